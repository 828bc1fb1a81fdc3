"""Plans how one expert's part of a parameter is read from a checkpoint's tensors."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from runtime.errors import CheckpointError
from runtime.store.tensor_index import StoredTensor

DEALS_OUT = "ErnieFuseAndSplitTextVisionExperts"
"""Stacks and joins like MergeModulelist and Concatenate, after dealing each list of experts out to
several parameters in equal parts."""

EXPERT = re.compile(r"experts\.(?:expert_)?(\d+)")
"""The number of an expert in the name of a tensor of its own."""

SCALED_TOGETHER = {"_blocks": "_scales", "_scales": "_blocks"}
"""Ends of names in MXFP4, where both are bytes."""

WITHIN_EXPERTS = ("Concatenate", "Fp8Dequantize", "Interleave", "Mxfp4Dequantize", "Transpose")
"""Operations that give an expert of a fused tensor the same whether they see it alone or with the
others, unless they move the experts' own dimension."""


@dataclass(frozen=True)
class FusedParameter:
    """A parameter `(experts, ...)` of an experts module, taken out of the model."""

    bank: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tied_to: str | None = None
    """Another parameter that is the same by the model's own word: a checkpoint has one of them."""
    members: tuple[str, ...] = ()
    """Names of the experts' own parameters, where the model keeps a module for each."""
    stored_experts: int = 0
    """Rows that a checkpoint may have: more than `num_experts` where the rest computes nothing."""

    @property
    def num_experts(self) -> int:
        return self.shape[0]

    @property
    def target(self) -> str:
        return f"{self.bank}.{self.name}"

    @property
    def owner(self) -> str:
        """The module that the parameter was taken out of."""
        return self.bank if self.members else self.target.rpartition(".")[0]

    def has_rows(self, count: int) -> bool:
        """Return whether a checkpoint with this many experts matches."""
        return count in (self.num_experts, self.stored_experts)


@dataclass
class WeightPlan:
    """A plan to read one expert's part of a fused parameter from the checkpoint."""

    parameter: FusedParameter
    sources: dict[str, list[StoredTensor]] = field(default_factory=dict)
    """Source pattern -> its tensors, in natural order: 10 after 9."""
    converter: WeightConverter | None = None

    @property
    def _steps(self) -> list[Any]:
        """The operations themselves."""
        return [] if self.converter is None else self.converter.operations

    @property
    def operations(self) -> list[str]:
        """Names of the library's operations, first to last."""
        return [type(step).__name__ for step in self._steps]

    @property
    def _lists_experts(self) -> bool:
        merged = {"MergeModulelist", DEALS_OUT} & set(self.operations) != set()
        return merged or self.parameter.members != ()

    @property
    def is_per_expert(self) -> bool:
        """True if each source has one tensor per expert, as in most checkpoints on the Hub."""
        return self._lists_experts and all(
            self.parameter.has_rows(len(extents)) for extents in self.sources.values()
        )

    @property
    def is_plain(self) -> bool:
        """True if the bytes need only a copy or a cast.

        That is a slice of a fused tensor, or tensors of one expert joined along their first
        dimension.
        """
        names, operations = self.operations, self._steps
        if not names:
            return True
        if not self.is_per_expert:
            return names == ["Concatenate"] and operations[0].dim == 1
        if names == [DEALS_OUT]:
            return (operations[0].stack_dim, operations[0].concat_dim) == (0, 1)
        return self.joins_experts(names)

    def joins_experts(self, last: list[str]) -> bool:
        """Return whether the last operations, of these names, stack experts and join each's parts.

        The parts are joined along their first dimension.
        """
        if self.converter is None or not self.is_per_expert:
            return False
        return last in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]) and all(
            getattr(op, "dim", 0) == i for i, op in enumerate(self._steps[-len(last) :])
        )

    @property
    def casts_first(self) -> bool:
        """True if sources are cast to the parameter's dtype before the operations.

        Transformers does so unless an operation reads a quantised checkpoint.
        """
        return not any(getattr(op, "hf_quantizer", None) for op in self._steps)

    @property
    def is_compressed(self) -> bool:
        """True if the library dequantises these tensors, and they take less than the parameter."""
        stored = sum(extent.num_bytes for extent in self.extents(0))
        size = math.prod(self.parameter.shape[1:]) * self.parameter.dtype.itemsize
        return not self.is_plain and not self.casts_first and stored < size

    def tensors(self) -> Iterator[StoredTensor]:
        """The checkpoint's tensors that the parameter is made of, of all experts."""
        return chain.from_iterable(self.sources.values())

    def extents(self, expert: int) -> list[StoredTensor]:
        """The expert's byte ranges, one for each source, in the order in which they are joined."""
        if self.is_per_expert:
            return [extents[expert] for extents in self.sources.values()]
        return [extents[0].slice(expert) for extents in self.sources.values()]

    @cached_property
    def kinds(self) -> list[list[StoredTensor]]:
        """The byte ranges of one expert of each kind: quantisers leave some experts as they are."""
        count = self.parameter.num_experts if self.is_per_expert else 1
        ranges = [self.extents(expert) for expert in range(count)]
        return list({tuple(extent.kind for extent in found): found for found in ranges}.values())

    def view_stacked(self) -> None:
        """Read stacked sources with the parameter's shape.

        A stacked source is `(experts * rows, columns)`, the parameter `(experts, rows, columns)`.
        """
        if self.converter is not None or self.parameter.members:
            return
        shape = self.parameter.shape
        for extents in self.sources.values():
            if len(extents) == 1 and math.prod(extents[0].shape) == math.prod(shape):
                extents[0] = replace(extents[0], shape=shape)

    def require_experts(self) -> None:
        """Raise CheckpointError if an expert's tensor is missing: the next would take its place."""
        if not self._lists_experts:
            return
        for extents in self.sources.values():
            found = {int(match[1]): match for e in extents if (match := EXPERT.search(e.key))}
            # What is dealt out to several parameters is numbered through.
            first = min(found, default=0) if DEALS_OUT in self.operations else 0
            most = max(self.parameter.num_experts, self.parameter.stored_experts)
            if found and len(extents) == len(found) and max(found) - first >= most > 0:
                raise CheckpointError(
                    f"{found[max(found)].string} is of expert {max(found)}, where the model's "
                    f"configuration says {most} experts; they are not of one model"
                )
            for number in range(first, first + self.parameter.num_experts):
                if found and number not in found:
                    match = next(iter(found.values()))
                    name = f"{match.string[: match.start(1)]}{number}{match.string[match.end(1) :]}"
                    raise CheckpointError(
                        f"the checkpoint has no tensor {name}; fetch the model again"
                    )

    def check(self) -> None:
        """Refuse layouts that cannot be read one expert at a time.

        Raises:
            CheckpointError: with the parameter and what the library would do to it, or with both
                sizes.
        """
        parameter = self.parameter
        fused = all(
            len(extents) == 1
            and len(extents[0].shape) > 0
            and parameter.has_rows(extents[0].shape[0])
            for extents in self.sources.values()
        )
        if not self.is_per_expert and (not fused or not self._acts_within_experts()):
            raise CheckpointError(
                f"{parameter.target}: one expert is no byte range of this checkpoint "
                f"(operations: {', '.join(self.operations) or 'none'})"
            )
        for extents in self.sources.values():
            for other in extents[1:]:
                if other.shape != extents[0].shape:
                    raise CheckpointError(
                        f"{parameter.target}: {other.key} is {other.shape}, {extents[0].key} is "
                        f"{extents[0].shape}; all experts of a layer have one shape"
                    )
                if other.dtype != extents[0].dtype and not self.casts_first:
                    raise CheckpointError(
                        f"{parameter.target}: {other.key} is {other.dtype}, {extents[0].key} is "
                        f"{extents[0].dtype}; of a layer all experts are quantised or none"
                    )
        shapes = [extent.shape for extent in self.extents(0)]
        joined = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if all(shapes) else ()
        if self.is_plain and (len({s[1:] for s in shapes}), joined) != (1, parameter.shape[1:]):
            raise CheckpointError(
                f"{parameter.target}: an expert is {parameter.shape[1:]} by the configuration, "
                f"{' and '.join(map(str, shapes))} in the checkpoint; they are not of one model"
            )

    def _acts_within_experts(self) -> bool:
        dims = [getattr(op, d, 1) for op in self._steps for d in ("dim", "dim0", "dim1")]
        return set(self.operations) <= set(WITHIN_EXPERTS) and not {0, -3} & set(dims)


def plan_weights(
    model: PreTrainedModel,
    parameters: Iterable[FusedParameter],
    extents: Mapping[str, StoredTensor],
    weight_mapping: Iterable[WeightRenaming | WeightConverter],
) -> dict[str, dict[str, WeightPlan]]:
    """`{experts module: {parameter: plan}}` for every fused parameter.

    Raises:
        CheckpointError: as `collect_sources`, or a layout that cannot be read expert by expert.
    """
    banks: dict[str, dict[str, WeightPlan]] = {}
    for plan in collect_sources(model, parameters, extents, weight_mapping):
        if plan.converter is not None:  # Concatenate joins in the order of the patterns
            patterns = plan.converter.source_patterns
            plan.sources = {p: plan.sources[p] for p in patterns if p in plan.sources}
        plan.view_stacked()
        plan.check()
        banks.setdefault(plan.parameter.bank, {})[plan.parameter.name] = plan
    return banks


def collect_sources(
    model: PreTrainedModel,
    parameters: Iterable[FusedParameter],
    extents: Mapping[str, StoredTensor],
    weight_mapping: Iterable[WeightRenaming | WeightConverter],
) -> list[WeightPlan]:
    """Find the tensors that lead to each fused parameter, by the library's rules.

    Raises:
        CheckpointError: a parameter that nothing in the checkpoint leads to, an expert's tensor
            that is missing, or, of any tensor of the model, quantised numbers without scales.
    """
    mapping = list(weight_mapping)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    plans = {parameter.target: WeightPlan(parameter) for parameter in parameters}
    # Where the model keeps a module for each expert, all of them lead to one plan.
    member_plans = {member: plan for plan in plans.values() for member in plan.parameter.members}
    state = model.state_dict()
    others: dict[str, dict[str, list[StoredTensor]]] = {
        name: {} for name, tensor in state.items() if tensor.is_floating_point()
    }
    known = dict.fromkeys([*state, *plans, *member_plans], True)
    for key in sorted(extents, key=dot_natural_key):
        target, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, known
        )
        if target not in known and key in known:
            # As the library does: a name that is right already is not renamed.
            target, pattern = rename_source_key(key, [], [], model.base_model_prefix, known)
        plan = plans.get(target) or member_plans.get(target)
        if plan is None:
            others.get(target, {}).setdefault(pattern or key, []).append(extents[key])
            continue
        if pattern is not None:
            plan.converter = by_pattern[pattern]
        source = pattern or (plan.parameter.target if target in member_plans else key)
        plan.sources.setdefault(source, []).append(extents[key])
    for plan in [plan for plan in plans.values() if DEALS_OUT in plan.operations]:
        _deal_out(plan, plans)
    _share_tied(plans)
    for sources in (*others.values(), *(plan.sources for plan in plans.values())):
        require_scales(sources)
    for plan in plans.values():
        if not plan.sources:
            raise CheckpointError(
                f"{plan.parameter.target}: no tensor of the checkpoint leads to it"
            )
        plan.require_experts()
    return list(plans.values())


def require_scales(sources: Mapping[str, list[StoredTensor]]) -> None:
    """Raise CheckpointError if numbers of one byte lead to a parameter without their scales.

    The library casts them, and integers and complex numbers of any size, which makes other weights.

    Args:
        sources: the tensors that lead to a floating-point parameter, by the library's patterns.
    """
    for name, extents in sources.items():
        stored = next((extent for extent in extents if not is_a_weight(extent.dtype)), None)
        if stored is None or name.endswith(("scale_inv", "activation_scale")):
            continue
        end = next((end for end in SCALED_TOGETHER if name.endswith(end)), "")
        partner = name.removesuffix(end) + SCALED_TOGETHER.get(end, "_scale_inv")
        if partner not in sources:
            dtype = str(stored.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{stored.key} ({dtype}) means nothing without {partner}, which the checkpoint has "
                "not, or its quantization_config does not make known; fetch the model again"
            )


def is_a_weight(dtype: torch.dtype) -> bool:
    """Return whether numbers of this dtype are weights as they are."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _deal_out(first: WeightPlan, plans: Mapping[str, WeightPlan]) -> None:
    """Gives each target of a converter its part of the lists that the first has collected."""
    converter = first.converter
    assert converter is not None
    targets = converter.target_patterns
    parts = {
        pattern: converter.operations[0].split_list_into_chunks(extents, len(targets))
        for pattern, extents in first.sources.items()
    }
    for i, target in enumerate(targets):
        plan = plans.get(first.parameter.target.replace(targets[0], target))
        if plan is not None:
            plan.converter = converter
            plan.sources = {pattern: part[i] for pattern, part in parts.items()}


def _share_tied(plans: Mapping[str, WeightPlan]) -> None:
    """A parameter that the checkpoint leaves out is read from where the one tied to it is."""
    for plan in plans.values():
        other = plans.get(plan.parameter.tied_to or "")
        if other is None:
            continue
        source, target = (other, plan) if other.sources else (plan, other)
        if not target.sources:
            target.sources, target.converter = dict(source.sources), source.converter
