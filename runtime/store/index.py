"""Which checkpoint tensors make up each expert, by the library's own renaming rules."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from runtime.errors import CheckpointError
from runtime.store.extents import Extent


@dataclass(frozen=True)
class FusedParameter:
    """A parameter `(experts, ...)` of an experts module, taken out of the model."""

    bank: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_experts(self) -> int:
        return self.shape[0]

    @property
    def target(self) -> str:
        return f"{self.bank}.{self.name}"


@dataclass
class Recipe:
    """How one expert's part of a fused parameter is made from the checkpoint."""

    parameter: FusedParameter
    sources: dict[str, list[Extent]] = field(default_factory=dict)
    """Source pattern -> its tensors, in natural order: 10 after 9."""
    converter: WeightConverter | None = None

    @property
    def _operations(self) -> list[str]:
        return (
            []
            if self.converter is None
            else [type(op).__name__ for op in self.converter.operations]
        )

    @property
    def is_per_expert(self) -> bool:
        """One tensor per expert and source, as most checkpoints on the Hub."""
        return "MergeModulelist" in self._operations and all(
            len(extents) == self.parameter.num_experts for extents in self.sources.values()
        )

    @property
    def is_plain(self) -> bool:
        """The bytes need no more than a copy or a cast: a slice of a fused tensor, or per-expert
        tensors stacked and joined along their first dimension."""
        if not self._operations:
            return True
        if not self.is_per_expert:
            return False
        names = self._operations
        if names not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
            return False
        assert self.converter is not None
        return all(getattr(op, "dim", 0) == i for i, op in enumerate(self.converter.operations))

    def extents(self, expert: int) -> list[Extent]:
        """The expert's byte ranges, one for each source, in the order in which they are joined."""
        if self.is_per_expert:
            return [extents[expert] for extents in self.sources.values()]
        return [extents[0].slice(expert) for extents in self.sources.values()]

    def check(self) -> None:
        """Refuses layouts that cannot be read one expert at a time.

        Raises:
            CheckpointError: with the parameter and what the library would do to it.
        """
        fused = all(
            len(extents) == 1 and extents[0].shape[:1] == (self.parameter.num_experts,)
            for extents in self.sources.values()
        )
        if not self.is_per_expert and not fused:
            raise CheckpointError(
                f"{self.parameter.target}: one expert is no byte range of this checkpoint "
                f"(operations: {', '.join(self._operations) or 'none'})"
            )


def index_experts(
    model: PreTrainedModel,
    parameters: Iterable[FusedParameter],
    extents: Mapping[str, Extent],
    weight_mapping: Iterable[WeightRenaming | WeightConverter],
) -> dict[str, dict[str, Recipe]]:
    """`{experts module: {parameter: recipe}}` for every fused parameter.

    Raises:
        CheckpointError: a parameter that nothing in the checkpoint leads to.
    """
    mapping = list(weight_mapping)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    recipes = {parameter.target: Recipe(parameter) for parameter in parameters}
    known = dict.fromkeys([*model.state_dict(), *recipes], True)
    for key in sorted(extents, key=dot_natural_key):
        target, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, known
        )
        recipe = recipes.get(target)
        if recipe is None:
            continue
        if pattern is not None:
            recipe.converter = by_pattern[pattern]
        recipe.sources.setdefault(pattern or key, []).append(extents[key])
    banks: dict[str, dict[str, Recipe]] = {}
    for recipe in recipes.values():
        if not recipe.sources:
            raise CheckpointError(
                f"{recipe.parameter.target}: no tensor of the checkpoint leads to it"
            )
        if recipe.converter is not None:  # Concatenate joins in the order of the patterns
            patterns = recipe.converter.source_patterns
            recipe.sources = {p: recipe.sources[p] for p in patterns if p in recipe.sources}
        recipe.check()
        banks.setdefault(recipe.parameter.bank, {})[recipe.parameter.name] = recipe
    return banks
