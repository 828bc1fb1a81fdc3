"""Schemes of checkpoints whose linear layers are packed integers (W4A16, W8A16)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import CheckpointError

AUTO_ROUND = "auto-round"
METHODS = {
    "compressed-tensors": "compressed-tensors",
    "gptq": "GPTQ",
    "awq": "AWQ",
    AUTO_ROUND: "AutoRound",
}
"""Methods as in `config.json`, and as their projects write them."""
EXCLUDES = "-:"
"""Before a pattern of GPTQ's `dynamic`: modules that are not quantised."""
GPTQ_V1, GPTQ_V2 = "gptq", "gptq_v2"
"""Checkpoint formats of GPTQ: the first stores zero points less one."""
PACKINGS = {
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": GPTQ_V1},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": GPTQ_V2},
    "auto_round": {"quant_method": "gptq", "checkpoint_format": GPTQ_V2},
    "auto_round:auto_awq": {"quant_method": "awq"},
}
"""Layouts in which AutoRound packs integers (its export, 0.16), as other methods' options."""
PLAIN_BITS = 16

WHOLE_ROW = -1
"""GPTQ's group size where a row is one group."""
CONSECUTIVE = (None, "weight", "static")
"""Activation orders of compressed-tensors that leave groups of consecutive weights."""


@dataclass(frozen=True)
class IntegerScheme:
    """The method and the numbers that the tensors' shapes do not tell."""

    method: str
    bits: int
    is_symmetric: bool
    zero_offset: int = 0
    """Added to stored zero points."""


def name_method(quantised: dict[str, Any]) -> str:
    """Returns a quantisation's method, which old configurations do not say."""
    if method := quantised.get("quant_method"):
        return str(method)
    if quantised.get("load_in_4bit") or quantised.get("load_in_8bit"):
        return "bitsandbytes"
    return "compressed-tensors" if "config_groups" in quantised else "an unnamed method"


def find_scheme(where: Path | str, quantised: Any) -> IntegerScheme | None:
    """Return the scheme of a `quantization_config`; None if it is of none of the `METHODS`.

    Raises:
        CheckpointError: a variant that is not served, by name.
    """
    method = name_method(quantised) if isinstance(quantised, dict) else ""
    if method not in METHODS:
        return None
    if method == "compressed-tensors":
        return _parse_compressed_tensors(where, quantised)
    if method == AUTO_ROUND:
        quantised = _read_auto_round(where, quantised)
        method = quantised["quant_method"]
    bits = quantised.get("bits", quantised.get("w_bit", 4))
    allowed = (4, 8) if method == "gptq" else (4,)
    _require(where, method, "bits", bits, allowed)
    if method == "awq":
        _require(where, method, "version", str(quantised.get("version", "gemm")).lower(), ("gemm",))
        return IntegerScheme(method, bits, is_symmetric=not quantised.get("zero_point", True))
    # With one group in a row, every order of its weights is the same.
    orders = bool(quantised.get("desc_act")) and quantised.get("group_size") != WHOLE_ROW
    _require(where, method, "desc_act", orders, (False,))
    _check_dynamic(where, method, quantised)
    kind = quantised.get("checkpoint_format") or GPTQ_V1
    _require(where, method, "checkpoint_format", kind, (GPTQ_V1, GPTQ_V2))
    return IntegerScheme(
        method,
        bits,
        is_symmetric=bool(quantised.get("sym", True)),
        zero_offset=int(kind == GPTQ_V1),
    )


def _read_auto_round(where: Path | str, quantised: dict[str, Any]) -> dict[str, Any]:
    """Return AutoRound's options as those of the method in whose layout it packs.

    Groups of single modules may differ, as their tensors tell, and those of 16 bits are plain.
    """
    own: dict[str, Any] = {"bits": 4, "sym": True, "data_type": "int"} | quantised
    packing = str(own.get("packing_format"))
    _require(where, AUTO_ROUND, "packing_format", packing, tuple(PACKINGS))
    _require(where, AUTO_ROUND, "data_type", own["data_type"], ("int",))
    modules = own.get("extra_config") or {}
    for name, value in own.items():
        # Such as spinquant_config: of weights that were rotated, the model would rotate the inputs.
        if name.endswith("_config") and name != "extra_config":
            _require(where, AUTO_ROUND, name, value or None, (None,))
    _require(where, AUTO_ROUND, "extra_config", type(modules), (dict,))
    for module, options in modules.items():
        _require(where, AUTO_ROUND, f"extra_config {module}", type(options), (dict,))
        changed = own | options
        if isinstance(changed["bits"], int) and changed["bits"] >= PLAIN_BITS:
            continue
        for option in ("bits", "sym", "data_type"):
            at = f"extra_config {module} {option}"
            _require(where, AUTO_ROUND, at, changed[option], (own[option],))
    return {**own, **PACKINGS[packing], "zero_point": not own["sym"]}


def _check_dynamic(where: Path | str, method: str, quantised: dict[str, Any]) -> None:
    """Refuse options of single modules that differ, but for groups, which their tensors tell.

    Modules that are excluded are plain in the checkpoint.
    """
    dynamic = quantised.get("dynamic") or {}
    _require(where, method, "dynamic", type(dynamic), (dict,))
    for pattern, options in dynamic.items():
        if pattern.startswith(EXCLUDES):
            continue
        _require(where, method, f"dynamic {pattern}", type(options), (dict,))
        for option, value in options.items():
            if option != "group_size":
                own = quantised.get(option) or None
                _require(where, method, f"dynamic {pattern} {option}", value or None, (own,))


def _parse_compressed_tensors(where: Path | str, quantised: dict[str, Any]) -> IntegerScheme:
    method, groups = "compressed-tensors", quantised.get("config_groups")
    sparsity = quantised.get("sparsity_config") or {}
    kind = sparsity.get("format") if isinstance(sparsity, dict) else sparsity
    _require(where, method, "sparsity_config.format", kind, (None, "dense"))
    # Rotations, which the model would have to compute too.
    _require(where, method, "transform_config", quantised.get("transform_config") or None, (None,))
    chosen = set()
    for group in groups.values() if isinstance(groups, dict) else []:
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        kind = group.get("format") or quantised.get("format")
        _require(where, method, "format", kind, ("pack-quantized",))
        _require(where, method, "weights.type", weights.get("type", "int"), ("int",))
        _require(where, method, "weights.num_bits", weights.get("num_bits"), (4, 8))
        _require(where, method, "weights.actorder", weights.get("actorder") or None, CONSECUTIVE)
        chosen.add((weights["num_bits"], bool(weights.get("symmetric", True))))
    if len(chosen) != 1:
        raise CheckpointError(
            f"{where} is quantised with {method} and {len(chosen)} kinds of weights in its "
            "config_groups; checkpoints with one kind are served"
        )
    (bits, is_symmetric) = chosen.pop()
    return IntegerScheme(method, bits, is_symmetric)


def _require(
    where: Path | str, method: str, option: str, value: object, served: tuple[object, ...]
) -> None:
    if value not in served:
        raise CheckpointError(
            f"{where} is quantised with {METHODS[method]} and {option}={value!r}, which is not "
            f"served (only {' and '.join(map(repr, served))})"
        )
