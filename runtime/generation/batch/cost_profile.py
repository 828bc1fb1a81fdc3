"""Measures what the planner needs, on this machine and with a loaded model.

Remembered in a file ("these results are cached locally", klotski 7).
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from predictors.files import cache_folder, write_json
from runtime.config import StoreConfig
from runtime.generation.batch.batching import Batch
from runtime.generation.batch.group_planner import PlannerCosts
from runtime.hf.kv import CacheSize, cache_bytes
from runtime.hf.layers import MoeLayer, moe_layers
from runtime.hf.tokens import pad_batch, pad_token_id
from runtime.profiling.facts import gpus, processor, usable_cores, versions
from runtime.profiling.local import expert_call, measure
from runtime.profiling.reading import seconds, typical
from runtime.store.base import slot_bytes

TIMED_STEPS = 3
"""Decode steps of one batch that are timed, behind its prompts."""
TIMED_TOKENS = (1, 64)
"""Tokens on an expert that is timed: what one more costs is their difference."""
REPEATS = 7
FORMAT = 2


@dataclass(frozen=True)
class CostProfile:
    """The planner's costs, and what one token of one row takes of a cache."""

    costs: PlannerCosts
    kv_bytes_per_token: int
    """Of all layers; of caches that do not grow, nothing."""
    kv_bytes_fixed: int
    """Of a row, whatever its length."""


@torch.no_grad()
def measure_costs(model: PreTrainedModel, batch: Batch) -> CostProfile:
    """Runs the batch's prompts and a few decode steps.

    What a predictor learns from them it keeps (its warm-up).

    Raises:
        TransferError: experts can not be read.
    """
    layers = moe_layers(model)
    clock = LayerClock(layers, model.device)
    with clock:
        caches = _run_steps(model, batch, clock)
    attention, gate = clock.typical()
    if model.device.type == "cpu":
        costs = _cpu_costs(model, attention, gate)
    else:
        costs = _device_costs(model, layers[0], attention, gate)
    return CostProfile(costs, caches.bytes_per_token, caches.bytes_fixed)


def _cpu_costs(model: PreTrainedModel, attention: float, gate: float) -> PlannerCosts:
    """On the CPU reads take the processor that computes: both slow down together."""
    driver = model.moecast.engine.driver
    with driver.paused():
        machine = measure(model)
    slow = 1 / max(0.05, machine.overheads.compute_speed_transferring)
    read = machine.transfer_seconds(sum(machine.chunk_bytes))
    return PlannerCosts(
        attention=attention * slow,
        gate=gate * slow,
        expert_fixed=machine.expert_fixed * slow,
        expert_per_token=machine.expert_per_token * slow,
        expert_io=read / max(0.05, machine.overheads.transfer_speed_computing),
    )


def _device_costs(
    model: PreTrainedModel, layer: MoeLayer, attention: float, gate: float
) -> PlannerCosts:
    """Copies to a device run beside its computation."""
    engine, device = model.moecast.engine, model.device
    size = slot_bytes(engine.store)
    host = torch.zeros(size, dtype=torch.uint8).pin_memory()
    slot = torch.zeros(size, dtype=torch.uint8, device=device)
    run = expert_call(layer, engine.store.layouts[0].weights(slot))
    width = model.config.get_text_config().hidden_size
    few, many = (
        torch.zeros(count, width, dtype=model.dtype, device=device) for count in TIMED_TOKENS
    )

    def synchronised(what: Callable[[], object]) -> float:
        def both() -> None:
            what()
            torch.cuda.synchronize(device)

        both()
        return typical([seconds(both) for _ in range(REPEATS)])

    one, more = synchronised(lambda: run(few)), synchronised(lambda: run(many))
    return PlannerCosts(
        attention=attention,
        gate=gate,
        expert_fixed=one,
        expert_per_token=max(0.0, more - one) / (TIMED_TOKENS[1] - TIMED_TOKENS[0]),
        expert_io=synchronised(lambda: slot.copy_(host, non_blocking=True)),
    )


def _run_steps(model: PreTrainedModel, batch: Batch, clock: "LayerClock") -> CacheSize:
    """Prompts, then `TIMED_STEPS` timed tokens of each row; what a row's cache takes."""
    tokens_BT, mask_BT = (
        part.to(model.device)
        for part in pad_batch([prompt.tokens for prompt in batch], pad_token_id(model))
    )
    if model.config.is_encoder_decoder:
        clock.listens = True
        model(tokens_BT, attention_mask=mask_BT, use_cache=False)
        return CacheSize(0, 0)
    output: Any = model(tokens_BT, attention_mask=mask_BT, use_cache=True)
    clock.listens = True
    before = cache_bytes(output.past_key_values)
    for _ in range(TIMED_STEPS):
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(batch), 1)], dim=1)
        output = model(
            output.logits[:, -1:].argmax(-1),
            attention_mask=mask_BT,
            past_key_values=output.past_key_values,
            use_cache=True,
        )
    return CacheSize.grown(
        before,
        cache_bytes(output.past_key_values),
        num_steps=TIMED_STEPS,
        num_rows=len(batch),
        num_tokens=mask_BT.shape[1],
    )


class LayerClock:
    """Hears when blocks, routers and experts begin and end; a device is waited for."""

    def __init__(self, layers: Sequence[MoeLayer], device: torch.device):
        self.listens = False
        self._layers = layers
        self._device = device
        self._began: dict[int, list[tuple[str, float]]] = {}
        self._attention: list[float] = []
        self._gate: list[float] = []
        self._hooks = ExitStack()

    def __enter__(self) -> "LayerClock":
        for layer in self._layers:
            for name, module in (
                ("block", layer.block),
                ("router", layer.router),
                ("experts", layer.experts),
            ):
                self._add(module.register_forward_pre_hook(self._hook(layer.index, name)))
                self._add(module.register_forward_hook(self._hook(layer.index, f"{name} end")))
        return self

    def _add(self, handle: Any) -> None:
        self._hooks.callback(handle.remove)

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _hook(self, layer: int, event: str) -> Callable[..., None]:
        def hook(_module: nn.Module, *_: object) -> None:
            if not self.listens:
                return
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            now = time.perf_counter()
            if event == "block":
                self._began[layer] = []
            self._began.setdefault(layer, []).append((event, now))
            if event == "block end":
                self._count(dict(self._began.pop(layer)))

        return hook

    def _count(self, at: dict[str, float]) -> None:
        """All of a block but its router and what its experts module does."""
        whole = at["block end"] - at["block"]
        gate = at["router end"] - at["router"] if "router" in at and "router end" in at else 0.0
        experts = 0.0
        if "experts" in at and "experts end" in at:
            experts = at["experts end"] - at["experts"]
        self._gate.append(gate)
        self._attention.append(max(0.0, whole - gate - experts))

    def typical(self) -> tuple[float, float]:
        """Attention and gate; 0 where a model's blocks were not heard."""
        if not self._attention:
            return 0.0, 0.0
        return typical(self._attention), typical(self._gate)


# ---- remembered


def load_or_measure(
    model: PreTrainedModel, batch: Batch, *, store: StoreConfig, again: bool = False
) -> tuple[CostProfile, bool]:
    """What was measured before for this model, machine and batch, or is measured now.

    Whether it was before.
    """
    path = cache_folder("measured") / f"{_cache_key(model, batch, store)}.json"
    known = None if again else _read_profile(path)
    if known is not None:
        return known, True
    found = measure_costs(model, batch)
    write_json(path, {"format": FORMAT, **asdict(found)})
    return found, False


def _cache_key(model: PreTrainedModel, batch: Batch, store: StoreConfig) -> str:
    """Of all that times depend on; lengths count by powers of two."""
    about = {
        "format": FORMAT,
        "model": model.moecast.spec.as_dict(),
        "folder": str(model.moecast.folder.resolve()),
        "slot_bytes": slot_bytes(model.moecast.engine.store),
        "store": [str(store.path), str(store.page_cache)],
        "device": str(model.device),
        "processor": processor(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "gpus": gpus() if model.device.type == "cuda" else [],
        "versions": versions(),
        "rows": len(batch),
        "length": max(len(one.tokens) for one in batch).bit_length(),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def _read_profile(path: Path) -> CostProfile | None:
    """None where nothing usable is there: it is then measured again."""
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    names = {field.name for field in fields(PlannerCosts)}
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or set(raw["costs"]) != names:
        return None
    return CostProfile(
        PlannerCosts(**raw["costs"]), raw["kv_bytes_per_token"], raw["kv_bytes_fixed"]
    )
