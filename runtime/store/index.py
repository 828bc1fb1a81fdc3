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
from runtime.store.extents import StoredTensor
from runtime.store.recipe import DEALS_OUT, FusedParameter, WeightPlan


def plan_weights(
    model: PreTrainedModel,
    parameters: Iterable[FusedParameter],
    extents: Mapping[str, StoredTensor],
    weight_mapping: Iterable[WeightRenaming | WeightConverter],
) -> dict[str, dict[str, WeightPlan]]:
    """`{experts module: {parameter: recipe}}` for every fused parameter.

    Raises:
        CheckpointError: a parameter that nothing in the checkpoint leads to.
    """
    mapping = list(weight_mapping)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    recipes = {parameter.target: WeightPlan(parameter) for parameter in parameters}
    # Where the model keeps a module for each expert, all of them lead to one recipe.
    of_member = {
        member: recipe for recipe in recipes.values() for member in recipe.parameter.members
    }
    known = dict.fromkeys([*model.state_dict(), *recipes, *of_member], True)
    for key in sorted(extents, key=dot_natural_key):
        target, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, known
        )
        if target not in known and key in known:
            # As the library does: a name that is right already is not renamed.
            target, pattern = rename_source_key(key, [], [], model.base_model_prefix, known)
        recipe = recipes.get(target) or of_member.get(target)
        if recipe is None:
            continue
        if pattern is not None:
            recipe.converter = by_pattern[pattern]
        source = pattern or (recipe.parameter.target if target in of_member else key)
        recipe.sources.setdefault(source, []).append(extents[key])
    for recipe in [one for one in recipes.values() if DEALS_OUT in one.operations]:
        _deal_out(recipe, recipes)
    _share_tied(recipes)
    banks: dict[str, dict[str, WeightPlan]] = {}
    for recipe in recipes.values():
        if not recipe.sources:
            raise CheckpointError(
                f"{recipe.parameter.target}: no tensor of the checkpoint leads to it"
            )
        if recipe.converter is not None:  # Concatenate joins in the order of the patterns
            patterns = recipe.converter.source_patterns
            recipe.sources = {p: recipe.sources[p] for p in patterns if p in recipe.sources}
        recipe.view_stacked()
        recipe.check()
        banks.setdefault(recipe.parameter.bank, {})[recipe.parameter.name] = recipe
    return banks


def _deal_out(first: WeightPlan, recipes: Mapping[str, WeightPlan]) -> None:
    """Gives each target of a converter its part of the lists that the first has collected."""
    converter = first.converter
    assert converter is not None
    targets = converter.target_patterns
    parts = {
        pattern: converter.operations[0].split_list_into_chunks(extents, len(targets))
        for pattern, extents in first.sources.items()
    }
    for i, target in enumerate(targets):
        recipe = recipes.get(first.parameter.target.replace(targets[0], target))
        if recipe is not None:
            recipe.converter = converter
            recipe.sources = {pattern: part[i] for pattern, part in parts.items()}


def _share_tied(recipes: Mapping[str, WeightPlan]) -> None:
    """A parameter that the checkpoint leaves out is read from where the one tied to it is."""
    for recipe in recipes.values():
        other = recipes.get(recipe.parameter.tied_to or "")
        if other is None:
            continue
        source, target = (other, recipe) if other.sources else (recipe, other)
        if not target.sources:
            target.sources, target.converter = dict(source.sources), source.converter
