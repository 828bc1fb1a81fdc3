"""Groups of micro-batches, which go through every layer one after another (Klotski, section 5)."""

from collections.abc import Callable, Sequence
from typing import Any

from runtime.policy.device_cache import DeviceCache
from runtime.sim.routing import count_tokens
from runtime.sim.step import BatchedStep, RecordedStep


class GroupStep(BatchedStep):
    """One forward pass of a group.

    The dense part of a layer is computed for one micro-batch at a time. As soon as a micro-batch's
    router has run, the experts that it chose are requested, before those of the next one are known.

    Args:
        micro_batches: A step of each micro-batch.
        merges_experts: Compute an expert once, on the tokens of all micro-batches; off: every
            micro-batch computes its experts by itself, in the order of their ids, before the next
            one does (Klotski, figure 7a).
        cache_bytes: Size of each micro-batch's KV cache of a layer if it is not on the device.
        weight_bytes: Size of a layer's other weights than experts if they are not on the device.
            While one micro-batch is computed, what the next needs is loaded; during a layer's
            experts, what the first one needs in the next layer (Klotski, algorithm 1).
    """

    def __init__(
        self,
        micro_batches: Sequence[RecordedStep],
        *,
        merges_experts: bool = True,
        cache_bytes: int = 0,
        weight_bytes: int = 0,
    ):
        super().__init__(micro_batches)
        self.micro_batches = tuple(micro_batches)
        self.merges_experts = merges_experts
        loads = [cache_bytes] * len(self.micro_batches)
        loads[0] += weight_bytes
        self.load_bytes = tuple(loads) if any(loads) else ()
        """Bytes to load before the dense part of each micro-batch in a layer; empty: none."""


AnySimulator = Any
"""A `Simulator`, or what has its methods for several devices."""


def split_micro_batches(step: RecordedStep) -> Sequence[RecordedStep]:
    """Returns the micro-batches of a step; a step that is no group is one."""
    return step.micro_batches if isinstance(step, GroupStep) else (step,)


def dense_seconds(step: RecordedStep, layer_seconds: Callable[[int], float]) -> float:
    """Returns the time of a layer without its experts, of all micro-batches together.

    Args:
        step: A forward pass.
        layer_seconds: The time of a number of tokens that are computed at once.
    """
    return sum(layer_seconds(len(batch.tokens_T)) for batch in split_micro_batches(step))


def simulate_dense(
    simulator: AnySimulator,
    devices: Sequence[DeviceCache],
    step: RecordedStep,
    layer: int,
    *,
    num_experts: int,
    layer_seconds: Callable[[int], float],
) -> None:
    """Computes a layer without its experts, micro-batch by micro-batch.

    The experts of each are requested when its router has run, as in a live group.
    """
    if not isinstance(step, GroupStep):
        simulator.compute(layer_seconds(len(step.tokens_T)))
        return
    micro_batches, load_bytes = step.micro_batches, step.load_bytes
    if load_bytes and layer == 0:
        simulator.start_load(load_bytes[0])
    for i, batch in enumerate(micro_batches):
        if load_bytes:
            simulator.finish_load()
            if load_bytes[i + 1 :]:
                simulator.start_load(load_bytes[i + 1])
        simulator.compute(layer_seconds(len(batch.tokens_T)))
        if len(micro_batches) > 1:
            for device in devices:
                device.request_early(layer, count_tokens(batch.experts(layer), num_experts))


def simulate_experts(
    simulator: AnySimulator, step: RecordedStep, layer: int, *, num_experts: int, is_last: bool
) -> None:
    """Computes the experts that a layer's router has chosen, when all of a step is routed.

    Args:
        simulator: Runs the layer.
        step: The forward pass.
        layer: Number of the layer.
        num_experts: Experts of a layer.
        is_last: No layer follows.
    """
    if isinstance(step, GroupStep) and step.load_bytes and not is_last:
        simulator.start_load(step.load_bytes[0])
    if isinstance(step, GroupStep) and not step.merges_experts:
        batches = [count_tokens(batch.experts(layer), num_experts) for batch in step.micro_batches]
        simulator.run_experts_by_batch(layer, batches)
    else:
        simulator.run_experts(layer, count_tokens(step.experts(layer), num_experts))
