"""Experts that are computed together, bitwise as Transformers' `grouped_mm` computes them.

Transformers sorts the pairs of a token and an expert by expert, multiplies the rows of each expert
by its matrices, restores the order, multiplies by the routing weights and adds up each token's rows
in the order of its choices. Here rows are multiplied as soon as their experts are ready; the rest
follows when all are. So the order of the sum never depends on what was late.

Nor does any other bit on a CPU: the rows of an expert are one product there, and they lie where
Transformers has them, in buffers of the same size. Both matter. The address of a matrix may change
the last bits of a product, and the position in a tensor those of an activation, whose vectors end
with single elements that are computed by other instructions.

On GPUs Transformers' own function multiplies the slots of an arena, one launch for all experts that
are ready.

Whether a model computes so is chosen here, too (`choose_exact`).

Shape suffixes: T tokens, D hidden size, F expert width (2F where gate and up are one matrix), K
top_k, S pairs of a token and an expert (T times K), N pairs of one launch.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from runtime.accelerator import host_copy, send
from runtime.config import Exact
from runtime.errors import CheckpointError
from runtime.hf.adapters.base import ExpertSource
from runtime.hf.adapters.fused import InterfaceAdapter
from runtime.hf.layers import MoeLayer, find_adapter, find_expert_banks
from runtime.store.base import name_format
from runtime.store.layout import ExpertLayout
from runtime.transfer.arena import MAX_GROUPS, Arena, SlotTable

GROUPED_MM = "grouped_mm"
"""Transformers' name of the implementation."""


class SlotSource(ExpertSource, Protocol):
    """Provides the slots of several experts at once, such as an engine."""

    def ready_slots(self, layer: int, wanted: list[int]) -> Iterator[dict[int, int]]:
        """Yield the slots of wanted experts by expert: at a time all that are ready."""

    def look_up(self, layer: int, experts_TK: Tensor) -> SlotTable | None:
        """Return where a layer's experts are, to be looked up on their device.

        None: the host has to know the choice and to ask for `ready_slots`.
        """


class ExpertRows(NamedTuple):
    """The rows of one expert, where the rows of all are sorted by expert."""

    start: int
    end: int


Rows = Mapping[int, ExpertRows]
"""By expert, ascending."""


class GroupedExperts:
    """The experts of one layer in an arena, whose rows are multiplied expert by expert: for CPUs.

    Args:
        source: may be replaced between forward passes.
    """

    def __init__(self, module: nn.Module, source: SlotSource, layer: int, arena: Arena):
        self.source = source
        self._layer = layer
        self._num_experts = int(module.num_experts)
        self._up = "gate_up_proj" if module.has_gate else "up_proj"
        self._is_transposed = bool(module.is_transposed)
        self._stacked = arena.stacked_weights(layer)
        self._operands: dict[int, dict[str, Tensor]] = {}
        """By slot and name of the parameter: matrices as a product takes them, and biases."""

    def compute(
        self, module: nn.Module, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        """Return each token's weighted sum `(T, D)`; ids beyond the last expert add nothing."""
        rows = find_rows(experts_TK)
        ready = self.request(rows)
        return self.combine(module, hidden_TD, experts_TK, weights_TK, rows, ready)

    def request(self, rows: Rows) -> Iterator[dict[int, int]]:
        """Yield the slots of the experts that have rows."""
        wanted = [expert for expert in rows if expert < self._num_experts]
        return self.source.ready_slots(self._layer, wanted)

    def combine(
        self,
        module: nn.Module,
        hidden_TD: Tensor,
        experts_TK: Tensor,
        weights_TK: Tensor,
        rows: Rows,
        ready: Iterable[Mapping[int, int]],
    ) -> Tensor:
        """Multiply what is ready, until all is, and add up each token's rows."""
        # Not a stable sort: the order of an expert's rows is Transformers', too.
        order_S = experts_TK.reshape(-1).sort().indices
        x_SD = hidden_TD[order_S // experts_TK.shape[1]].to(self._stacked["down_proj"].dtype)
        output_SD = torch.zeros_like(x_SD)
        self.multiply(module, x_SD, output_SD, rows, ready)
        if module.has_post_expert_norm:
            output_SD = module.post_expert_norm(output_SD)
        unsorted_SD = torch.empty_like(output_SD)
        unsorted_SD[order_S] = output_SD
        weighted_SD = unsorted_SD * weights_TK.reshape(-1, 1)
        return weighted_SD.view(*experts_TK.shape, -1).sum(dim=1).to(hidden_TD.dtype)

    def multiply(
        self,
        module: nn.Module,
        x_SD: Tensor,
        output_SD: Tensor,
        rows: Rows,
        ready: Iterable[Mapping[int, int]],
    ) -> None:
        """Write the rows of all experts to `output_SD`, each when its slot is given."""
        activate = module._apply_gate if module.has_gate else module.act_fn
        up_width = self._stacked[self._up].shape[2 if self._is_transposed else 1]
        up_SF = x_SD.new_zeros(len(x_SD), up_width)
        for slots in ready:
            for expert, slot in slots.items():
                self._multiply_expert(self._up, x_SD, up_SF, rows[expert], slot)
            # Of all rows, though those of other experts are of no use now.
            inner_SF = activate(up_SF)
            for expert, slot in slots.items():
                self._multiply_expert("down_proj", inner_SF, output_SD, rows[expert], slot)

    def _multiply_expert(
        self, name: str, x_SD: Tensor, output_SD: Tensor, rows: ExpertRows, slot: int
    ) -> None:
        operands = self._operands.get(slot)
        if operands is None:
            operands = self._operands[slot] = self._view_slot(slot)
        output_ND = output_SD[rows.start : rows.end]
        torch.mm(x_SD[rows.start : rows.end], operands[name], out=output_ND)
        if (bias := operands.get(f"{name}_bias")) is not None:
            output_ND += bias

    def _view_slot(self, slot: int) -> dict[str, Tensor]:
        views = {name: stacked[slot] for name, stacked in self._stacked.items()}
        if self._is_transposed:
            return views
        return {name: view.t() if view.ndim == 2 else view for name, view in views.items()}


def find_rows(experts_TK: Tensor) -> Rows:
    """Count the rows of each chosen expert."""
    counts = sorted(Counter(experts_TK.flatten().tolist()).items())
    ends = accumulate((count for _, count in counts), initial=0)
    return {
        expert: ExpertRows(*part) for (expert, _), part in zip(counts, pairwise(ends), strict=True)
    }


class ArenaModule:
    """Stands for an experts module whose experts are slots of an arena; ids are slots."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, Tensor], **overrides: Any):
        self._module = module
        vars(self).update(parameters, **overrides)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class GroupedLaunches(GroupedExperts):
    """Experts that Transformers' own function multiplies where they lie: for GPUs.

    Where all experts of the tokens have a slot, it is one launch, whose result is the function's
    own. Otherwise each launch gives the rows of its experts, and the rest is as on a CPU. The
    kernel may depend on the number of rows of a launch, and with it the last bits.
    """

    def compute(
        self, module: nn.Module, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        table = self.source.look_up(self._layer, experts_TK)
        if table is not None:
            slots_TK = table.places_E[experts_TK]
            return self._launch(module, hidden_TD, slots_TK, weights_TK, table.slots)
        ids_TK = host_copy(experts_TK)
        rows = find_rows(ids_TK)
        ready = self.request(rows)
        first = next(ready, {})
        if first.keys() != rows.keys() or len(list(_split(first))) > 1:
            ready = chain([first], ready)
            return self.combine(module, hidden_TD, experts_TK, weights_TK, rows, ready)
        slots = _between(first)
        place_E = torch.zeros(self._num_experts, dtype=torch.long)
        place_E[list(first)] = torch.tensor(list(first.values())) - slots.start
        slots_TK = send(place_E[ids_TK], experts_TK.device)
        output_TD = self._launch(module, hidden_TD, slots_TK, weights_TK, slots)
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
            span = _between(slots)
            pairs = [
                (place, slot - span.start) for e, slot in slots.items() for place in range(*rows[e])
            ]
            places_N, slots_N = send(torch.tensor(pairs).t().contiguous(), x_SD.device)
            x_ND = x_SD[places_N]
            output_SD[places_N] = self._launch(
                module,
                x_ND,
                slots_N[:, None],
                x_ND.new_ones(len(x_ND), 1),
                span,
                has_post_expert_norm=False,
            )

    def _launch(
        self,
        module: nn.Module,
        hidden_TD: Tensor,
        slots_TK: Tensor,
        weights_TK: Tensor,
        slots: range,
        **overrides: Any,
    ) -> Tensor:
        """Call Transformers' function with `slots`, of which `slots_TK` are positions."""
        parameters = {n: stack[slots.start : slots.stop] for n, stack in self._stacked.items()}
        experts = ArenaModule(module, parameters, num_experts=len(slots), **overrides)
        output: Tensor = ALL_EXPERTS_FUNCTIONS[GROUPED_MM](experts, hidden_TD, slots_TK, weights_TK)
        return output


def _between(slots: Mapping[int, int]) -> range:
    """Return the slots from the first of these to the last."""
    return range(min(slots.values()), max(slots.values()) + 1)


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


QUANTISED = "the checkpoint's experts are quantised, and Transformers groups other matrices only"


def choose_exact(wanted: Exact, device: torch.device, obstacle: str | None) -> Exact:
    """Return what `wanted` stands for, never `auto`.

    Args:
        obstacle: the reason why experts cannot be grouped; None: they can.

    Raises:
        CheckpointError: `grouped` in spite of an obstacle.
    """
    if wanted is Exact.GROUPED and obstacle is not None:
        raise CheckpointError(
            f"model.exact=grouped: {obstacle}; use model.exact=eager, or auto, which groups where "
            "that is possible"
        )
    if wanted is Exact.AUTO:
        return Exact.EAGER if device.type == "cpu" or obstacle is not None else Exact.GROUPED
    return wanted


def find_model_obstacle(model: PreTrainedModel) -> str | None:
    """Return why Transformers does not group a model's experts; it may be on the meta device."""
    for name, module in find_expert_banks(model).items():
        if not isinstance(find_adapter(module), InterfaceAdapter):
            return f"{name} ({type(module).__name__}) computes its experts with other code"
    return None


def find_store_obstacle(layouts: Sequence[ExpertLayout]) -> str | None:
    """Return why experts that lie in memory like this are not grouped."""
    for layout in layouts:
        if not layout.is_plain:
            return f"experts are {name_format(layout)} in memory, and such matrices are not grouped"
    return None


def attach_grouped(
    layers: Sequence[MoeLayer], source: SlotSource, arena: Arena
) -> list[GroupedExperts]:
    """Let layers, attached before, compute the experts in an arena together."""
    attached = []
    for layer in layers:
        make = GroupedExperts if arena.device.type == "cpu" else GroupedLaunches
        layer.experts.moecast_grouped = make(layer.experts, source, layer.index, arena)
        attached.append(layer.experts.moecast_grouped)
    return attached


def set_reference(model: PreTrainedModel, wanted: Exact) -> Exact:
    """Let a whole model, as Transformers loads it, compute what a served one is compared with.

    Returns:
        The setting in force, never `auto`; `eager` for `shared`, which is the same for a sequence
        that is not in a block.

    Raises:
        CheckpointError: `grouped`, and Transformers does not group this model's experts.
    """
    obstacle = find_model_obstacle(model)
    if getattr(model.config, "quantization_config", None) is not None:
        obstacle = QUANTISED
    exact = choose_exact(wanted, model.device, obstacle)
    if exact is Exact.GROUPED:
        model.set_experts_implementation(GROUPED_MM)
        # Off the CPU, `generate` would compute single tokens as `batched_mm`, with other last bits.
        model._optimize_model_for_decode = nullcontext
    return Exact.EAGER if exact is Exact.SHARED else exact
