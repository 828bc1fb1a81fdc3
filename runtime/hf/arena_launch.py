"""Transformers' `grouped_mm` over the slots of an arena: one launch for all experts that are ready.

Shape suffixes: T tokens, D hidden size, K top_k, S pairs of a token and an expert (T times K), N
pairs of one launch.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from runtime.hf.grouped import GroupedExperts, Rows, find_rows

GROUPED_MM = "grouped_mm"
"""Transformers' name of the implementation."""
MAX_GROUPS = 1023
"""Experts, here slots, that PyTorch's kernel for CUDA takes in one launch."""


class ArenaModule:
    """Stands for an experts module whose experts are slots of an arena; ids are slots."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, Tensor], **overrides: Any):
        self._module = module
        vars(self).update(parameters, **overrides)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class GroupedLaunches(GroupedExperts):
    """Experts that Transformers' own function multiplies where they lie: for GPUs.

    Where all experts of the tokens are ready at once, the result is the function's own. Otherwise
    each launch gives the rows of its experts, and the rest is as on a CPU. The kernel may depend on
    the number of rows of a launch, and with it the last bits.
    """

    def compute(
        self, module: nn.Module, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        rows = find_rows(experts_TK)
        ready = self.request(rows)
        first = next(ready, {})
        if first.keys() != rows.keys() or len(list(_split(first))) > 1:
            ready = chain([first], ready)
            return self.combine(module, hidden_TD, experts_TK, weights_TK, rows, ready)
        slot_E = torch.zeros(self._num_experts, dtype=experts_TK.dtype)
        slot_E[list(first)] = torch.tensor(list(first.values()), dtype=slot_E.dtype)
        slots_TK = slot_E.to(experts_TK.device)[experts_TK]
        output_TD = self._launch(module, hidden_TD, slots_TK, weights_TK, first)
        assert next(ready, None) is None
        return output_TD

    def multiply(
        self,
        module: nn.Module,
        x_SD: Tensor,
        output_SD: Tensor,
        rows: Rows,
        ready: Iterable[Mapping[int, int]],
    ) -> None:
        for slots in chain.from_iterable(map(_split, ready)):
            counts = torch.tensor([rows[e].end - rows[e].start for e in slots])
            slots_N = torch.tensor(list(slots.values())).repeat_interleave(counts)
            places_N = torch.cat([torch.arange(*rows[e]) for e in slots]).to(x_SD.device)
            x_ND = x_SD[places_N]
            output_SD[places_N] = self._launch(
                module,
                x_ND,
                slots_N[:, None].to(x_SD.device),
                x_ND.new_ones(len(x_ND), 1),
                slots,
                has_post_expert_norm=False,
            )

    def _launch(
        self,
        module: nn.Module,
        hidden_TD: Tensor,
        slots_TK: Tensor,
        weights_TK: Tensor,
        slots: Mapping[int, int],
        **overrides: Any,
    ) -> Tensor:
        first, end = min(slots.values()), max(slots.values()) + 1
        parameters = {name: stacked[first:end] for name, stacked in self._stacked.items()}
        experts = ArenaModule(module, parameters, num_experts=end - first, **overrides)
        output: Tensor = ALL_EXPERTS_FUNCTIONS[GROUPED_MM](
            experts, hidden_TD, slots_TK - first, weights_TK
        )
        return output


def _split(slots: Mapping[int, int]) -> Iterator[dict[int, int]]:
    """Divide experts so that the slots of each part are at most `MAX_GROUPS` apart."""
    part: dict[int, int] = {}
    for expert, slot in sorted(slots.items(), key=lambda item: item[1]):
        if part and slot - min(part.values()) >= MAX_GROUPS:
            yield part
            part = {}
        part[expert] = slot
    if part:
        yield part
