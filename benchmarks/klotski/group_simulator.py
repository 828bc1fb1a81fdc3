"""Groups of micro-batches, which go through every layer one after another (Klotski, section 5)."""

import functools
from collections import deque
from collections.abc import Sequence

from runtime.policy.device_cache import count_tokens
from runtime.sim.hardware import Hardware
from runtime.sim.simulator import Simulator, make_simulator
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


class GroupSimulator(Simulator):
    """A simulated device that computes groups, micro-batch by micro-batch."""

    def run_dense(self, step: GroupStep, layer: int) -> None:  # type: ignore[override]
        """Computes a layer without its experts.

        The experts of each micro-batch are requested when its router has run, as in a live group.
        """
        if step.load_bytes and layer == 0:
            self._start_load(step.load_bytes[0])
        for i, batch in enumerate(step.micro_batches):
            if step.load_bytes:
                self._finish_load()
                if step.load_bytes[i + 1 :]:
                    self._start_load(step.load_bytes[i + 1])
            self.compute(self.layer_seconds(len(batch.tokens_T)))
            if len(step.micro_batches) > 1:
                self.cache.request_early(layer, self._count(batch, layer))

    def run_chosen(self, step: GroupStep, layer: int, chosen: dict[int, int]) -> None:  # type: ignore[override]
        if step.load_bytes and layer + 1 < len(self.cache.counters):
            self._start_load(step.load_bytes[0])
        if step.merges_experts:
            self.run_experts(layer, chosen)
        else:
            batches = [self._count(batch, layer) for batch in step.micro_batches]
            self._run_by_batch(layer, chosen, batches)

    def _count(self, step: RecordedStep, layer: int) -> dict[int, int]:
        return count_tokens(step.experts(layer), self.spec.num_experts)

    def _run_by_batch(
        self, layer: int, chosen: dict[int, int], batches: Sequence[dict[int, int]]
    ) -> None:
        """Requests what the whole group needs and computes it micro-batch by micro-batch.

        An expert is released when the last micro-batch that needs it has computed it.
        """
        self.begin_requests(layer, chosen)
        uses = deque(use for batch in batches for use in sorted(batch.items()))
        while uses:
            e, num_tokens = uses[0]
            self.cache.make_room(layer, e, list(dict.fromkeys(e for e, _ in uses)))
            self.loop.wait_for(self.cache, layer, [e])
            self.compute(self.expert_seconds(num_tokens), (layer, e))
            uses.popleft()
            if all(e != later for later, _ in uses):
                self.cache.release((layer, e))

    # ---- other bytes than experts

    def _start_load(self, num_bytes: int) -> None:
        """Starts a transfer to the device, such as of KV caches, in parallel with experts'.

        Both have `Overheads.transfer_speed_together` of the link's speed.
        """
        assert not self.top.is_loading(), "one load at a time"
        self.top.load(self.hardware.transfer_seconds(num_bytes))

    def _finish_load(self) -> None:
        """Waits for the end of the last load."""
        started = self.now
        while self.top.is_loading():
            self.loop.pump()
            self.loop.wait()
        self.loop.stall_seconds += self.now - started


make_group_machine = functools.partial(make_simulator, kind=GroupSimulator)
"""Makes the machine of a replay of groups."""


def dense_seconds(step: RecordedStep, hardware: Hardware) -> float:
    """Returns the time of a layer without its experts, of all micro-batches together."""
    assert isinstance(step, GroupStep)
    return sum(hardware.layer_seconds(len(batch.tokens_T)) for batch in step.micro_batches)
