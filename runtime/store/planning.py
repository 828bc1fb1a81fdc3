"""Finds the checkpoint tensors of each expert, by Transformers' own renaming rules."""

from collections.abc import Iterable, Mapping

from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from runtime.errors import CheckpointError
from runtime.store.tensor_index import StoredTensor
from runtime.store.weight_plan import DEALS_OUT, FusedParameter, WeightPlan


def plan_weights(
    model: PreTrainedModel,
    parameters: Iterable[FusedParameter],
    extents: Mapping[str, StoredTensor],
    weight_mapping: Iterable[WeightRenaming | WeightConverter],
) -> dict[str, dict[str, WeightPlan]]:
    """`{experts module: {parameter: plan}}` for every fused parameter.

    Raises:
        CheckpointError: a parameter that nothing in the checkpoint leads to.
    """
    mapping = list(weight_mapping)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    plans = {parameter.target: WeightPlan(parameter) for parameter in parameters}
    # Where the model keeps a module for each expert, all of them lead to one plan.
    member_plans = {member: plan for plan in plans.values() for member in plan.parameter.members}
    known = dict.fromkeys([*model.state_dict(), *plans, *member_plans], True)
    for key in sorted(extents, key=dot_natural_key):
        target, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, known
        )
        if target not in known and key in known:
            # As the library does: a name that is right already is not renamed.
            target, pattern = rename_source_key(key, [], [], model.base_model_prefix, known)
        plan = plans.get(target) or member_plans.get(target)
        if plan is None:
            continue
        if pattern is not None:
            plan.converter = by_pattern[pattern]
        source = pattern or (plan.parameter.target if target in member_plans else key)
        plan.sources.setdefault(source, []).append(extents[key])
    for plan in [plan for plan in plans.values() if DEALS_OUT in plan.operations]:
        _deal_out(plan, plans)
    _share_tied(plans)
    banks: dict[str, dict[str, WeightPlan]] = {}
    for plan in plans.values():
        if not plan.sources:
            raise CheckpointError(
                f"{plan.parameter.target}: no tensor of the checkpoint leads to it"
            )
        if plan.converter is not None:  # Concatenate joins in the order of the patterns
            patterns = plan.converter.source_patterns
            plan.sources = {p: plan.sources[p] for p in patterns if p in plan.sources}
        plan.view_stacked()
        plan.check()
        banks.setdefault(plan.parameter.bank, {})[plan.parameter.name] = plan
    return banks


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
