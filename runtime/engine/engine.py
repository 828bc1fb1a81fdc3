"""The engine: one loop that serves a model's experts from its cache, on the model's own thread.

At each event of the model it asks the predictors, tells the policy core, and pumps: what has
arrived is booked, and what comes next is submitted to the rings, which move bytes meanwhile.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.ma  # np.unique imports it at its first call, when there may be no descriptor left
from torch import Tensor

from predictors.base import Floats, Ints, Signal
from runtime.accelerator import Accelerator
from runtime.engine.driver import PredictorDriver
from runtime.engine.host_compute import HostCompute
from runtime.engine.resident_experts import ResidentExperts
from runtime.engine.stats import StepStats
from runtime.errors import CheckpointError
from runtime.policy.counters import CacheCounters, sum_counters
from runtime.policy.device_cache import DeviceCache, count_tokens
from runtime.policy.eviction.base import Expert
from runtime.policy.forecast_payoff import ForecastPayoff
from runtime.store.base import ExpertStore, max_decoded_bytes
from runtime.store.ggml.matrix import ExpertWeights
from runtime.transfer.arena import Arena, SlotTable
from runtime.transfer.loop import TimelineSink
from runtime.transfer.watched_loop import WatchedLoop


class ForwardPassLock:
    """Lets one thread run forward passes at a time; acquired in one hook, released in another.

    Ctrl-C may cut either short. So the lock is reentrant and does not count: the next pass of a
    thread that was left with it begins at once, and its end gives it back altogether.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None

    def begin(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    @property
    def is_mine(self) -> bool:
        """True if this thread has the lock, which it has not if its pass did not begin."""
        return self._owner == threading.get_ident()

    def end(self) -> None:
        """Release the lock, however often this thread has acquired it; nothing if it has not."""
        if self.is_mine:
            self._owner = None
        with contextlib.suppress(RuntimeError):  # raised when this thread does not hold it
            while True:
                self._lock.release()


class Engine:
    """Receives a model's events and provides its experts as soon as their bytes have arrived.

    Args:
        arenas: In the order of the loop's links and `cache.tiers`: by device, the computing tier
            first.
        host_compute: Chooses missed experts to compute in the second arena; None: all are copied.
    """

    def __init__(
        self,
        *,
        store: ExpertStore,
        arenas: Sequence[Arena],
        cache: DeviceCache,
        loop: WatchedLoop,
        driver: PredictorDriver,
        host_compute: HostCompute | None = None,
    ):
        self.store = store
        self.arenas = tuple(arenas)
        self.cache = cache
        self.loop = loop
        self.driver = driver
        self.stats = StepStats()
        self._tops = {
            link.tier: (arena, link.ring)
            for arena, link in zip(self.arenas, loop.links, strict=True)
            if link.tier.is_top
        }
        """The computing tier of each device, with its arena and its ring."""
        self._num_experts = store.num_experts
        self._forward_lock = ForwardPassLock()
        self._pinned: Expert | None = None
        """Expert that `pin` returned last and that is still pinned."""
        self._pending: dict[int, list[int]] = {}
        """Requested experts by layer that have not been computed yet."""
        self._host_compute = host_compute
        self._waits_on_device = loop.links[0].ring.can_join
        """The computation waits for copies, not the host."""
        self._resident: ResidentExperts | None = None
        """Looks experts up where one device computes them together; None: the host does."""
        self._is_looked_up = False
        """The step needs no choice of a router in host memory."""
        self._requests: frozenset[int] = frozenset()
        """Requests whose tokens the last step computed."""
        self._num_tokens = 0
        """Tokens of the step."""
        self._is_complete = False
        """The step began with every expert in its place: nothing is requested or transferred."""
        self._experts_done_at = time.perf_counter()
        """Time at which the last routed expert was computed."""
        self.payoff = ForecastPayoff(driver, cache, loop) if cache.system.adaptive else None
        """Turns forecasting off where it does not pay; None: it is always on."""
        self._closed = False
        self._is_intact = True
        """False during a step, and after one that did not end properly."""
        if cache.begins_full:
            self._fill(cache.first_experts(fills_top=True))
        loop.pump(is_idle=True)

    def _fill(self, first_experts: Sequence[Sequence[Expert]]) -> None:
        """Read the experts that each tier begins with: all, or those of the first layers.

        The computing tiers come first: what passes through host memory leaves it again. Experts
        that cannot be read are left out.
        """
        for tier, experts in zip(self.cache.tiers, first_experts, strict=True):
            for expert in experts:
                tier.request(expert)
            coming = list(experts)
            while coming and not self.loop.num_hanging:
                self.loop.pump()
                while coming and (tier.is_ready(coming[-1]) or coming[-1] in self.loop.errors):
                    coming.pop()
                if coming:
                    self.loop.wait()
            for expert in experts:
                tier.release(expert)
            tier.counters = [CacheCounters() for _ in tier.counters]

    def look_up_on(self, accelerator: Accelerator) -> None:
        """Look experts up on the device, which computes a layer's together, once all are there."""
        self._resident = ResidentExperts(
            self.cache,
            self.arenas[0].device,
            accelerator,
            lambda layer, experts_TK: self.cache.count_routed(
                layer, count_tokens(experts_TK, self._num_experts)
            ),
        )

    # ---- events of the model (`EventListener`)

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        self._forward_lock.begin()
        self._refuse_if_closed()
        requests = frozenset(np.unique(requests_T).tolist())
        new_request = not requests <= self._requests
        self._requests = requests
        self._num_tokens = len(tokens_T)
        if not self._is_intact:
            self._recover()
        self._is_intact = False
        self._unpin()
        self._cancel_leftovers()
        if self.payoff is not None:
            self.payoff.begin_step()
        if not self.cache.is_complete:
            self.loop.trim()
            self.loop.pump()
        self._is_complete = self.cache.is_complete
        if not self._is_complete:
            self.cache.begin_step(requests_T)
        is_prefill = new_request or len(tokens_T) > len(requests)
        self.stats.begin_step(is_prefill=is_prefill)
        self._experts_done_at = time.perf_counter()
        self.driver.begin_step(tokens_T, requests_T, is_decode=not is_prefill)
        self._is_looked_up = (
            self._is_complete
            and self._resident is not None
            and not self.driver.hears_routing
            and self.loop.timeline is None
        )

    def listens(self, signal: Signal, layer: int) -> bool:
        """Returns whether somebody uses this signal of this layer in this step."""
        if signal is Signal.ROUTED:
            return not self._is_looked_up
        return self.driver.listens(signal, layer)

    def _recover(self) -> None:
        """Begin with what has fully arrived, after Ctrl-C cut a step short anywhere."""
        self._wait_for_computation()
        self._pinned = None
        self._pending.clear()
        if self._host_compute is not None:
            self._host_compute.forget()
        if self._resident is not None:
            self._resident.forget()
        self.loop.drain()
        self.cache.reset([self.loop.lost_slots(link) for link in self.loop.links])

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        self.driver.layer_input(layer, hidden_TD)
        self.pump()

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        self.driver.gate_input(layer, hidden_TD)  # its routing follows at once

    def routed(
        self, layer: int, experts_TK: Ints, logits_TE: Floats | None, _weights_TK: Floats | None
    ) -> None:
        tokens_per_expert = count_tokens(experts_TK, self._num_experts)
        if not self._is_complete:
            # Else what arrived during attention would count as missing, and be scored for at once.
            self.loop.book()
        self.driver.before_request(layer, experts_TK, logits_TE, tokens_per_expert)
        self._request(layer, tokens_per_expert, experts_TK)
        if self.loop.timeline is not None:
            self.loop.timeline.computed_dense(layer, self._experts_done_at, time.perf_counter())
        self.driver.routed(layer, experts_TK, logits_TE)
        self.pump()

    def partly_routed(self, layer: int, experts_TK: Ints) -> None:
        """Request experts of those of the step's tokens that have reached the layer's router."""
        if self._is_complete:
            return
        chosen = count_tokens(experts_TK, self._num_experts)
        self.loop.forget_failures(layer, self.cache.request_early(layer, chosen))
        self.loop.pump()

    def failed_experts(self, layer: int) -> frozenset[int]:
        """Return the layer's experts whose last request failed."""
        return frozenset(e for error_layer, e in self.loop.errors if error_layer == layer)

    def pump(self) -> None:
        """Book what has arrived, and submit what comes next."""
        if not self._is_complete:
            self.loop.pump()

    def end_step(self) -> None:
        try:
            if self._forward_lock.is_mine:  # else the step did not begin: its input was rejected
                self._end_step()
        finally:
            # Last, because another thread's step may begin immediately.
            self._forward_lock.end()

    def _end_step(self) -> None:
        self.driver.end_step()
        start, seconds = self.stats.started, self.stats.end_step()
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, Exception):
            return  # Ctrl-C may have interrupted the bookkeeping; the next step repairs it
        self._unpin()
        self._cancel_leftovers()
        if not self._is_complete:
            self.cache.end_step()
            self.loop.pump(is_idle=True)
        elif self._resident is not None:
            self._resident.end_step()
        self._is_intact = True
        if start is None or seconds is None:
            return
        if self.payoff is not None and not self.stats.is_prefill:
            self.payoff.record_step(seconds)
        if self.loop.timeline is not None:
            self.loop.timeline.step(self._num_tokens, start, start + seconds)

    # ---- requests of a layer

    def _request(
        self, layer: int, tokens_per_expert: dict[int, int], experts_TK: Ints | None = None
    ) -> list[int]:
        self._refuse_if_closed()
        if self._is_complete:
            self.cache.count_routed(layer, tokens_per_expert)
            order = self._pending[layer] = list(tokens_per_expert)
            return order
        self._unpin()
        self._cancel_leftovers()
        early = self.cache.requested_early(layer)
        self.loop.forget_failures(layer, [e for e in tokens_per_expert if e not in early])
        if experts_TK is not None and len(experts_TK) == self._num_tokens:
            self.cache.on_tokens_routed(layer, experts_TK)
        cache = self._host_compute or self.cache
        order = self._pending[layer] = cache.request_routed(layer, tokens_per_expert)
        self.loop.pump()
        return order

    def _requested(self, layer: int, wanted: list[int]) -> list[int]:
        """Return the wanted experts in their computing order; requests them if none has been.

        The layer may have no probed router, or its block may have changed the choice: `wanted` is
        right.
        """
        order = self._pending.get(layer)
        if order is None or sorted([*order, *self._on_host(layer)]) != wanted:
            order = self._request(layer, dict.fromkeys(wanted, 1))
        return order

    def _cancel_leftovers(self) -> None:
        """Cancel requests that were never computed, so that they occupy no slots.

        A forward pass may end in an exception, and a block may skip an expert.
        """
        if self._pending:
            self._wait_for_computation()
        for layer, order in self._pending.items():
            self.cache.cancel(layer, order)
        self._pending.clear()
        if self._host_compute is not None:
            self._host_compute.cancel()

    def _wait_for_computation(self) -> None:
        """Order transfers after the uses of slots that were not reported as `computed`."""
        for _, ring in self._tops.values():
            ring.wait_for_computation()

    # ---- experts for the model (`ExpertSource`)

    def ready(self, layer: int, wanted: list[int]) -> Iterator[dict[int, ExpertWeights]]:
        """Yield the wanted experts: at a time all that are ready, valid until the next are taken.

        Experts that are decoded come one by one, because each takes memory.

        Raises:
            TransferError: An expert's bytes did not arrive; the others are released.
        """
        order = self._requested(layer, wanted)
        while order or self._on_host(layer):
            if self._on_host(layer) and not self._find_ready(layer, order):
                yield from self._in_host_memory(layer)
                continue
            slots = self._next(layer, order)
            together = self.store.layouts[layer].views_are_weights
            try:
                for part in [slots] if together else [{e: slot} for e, slot in slots.items()]:
                    start = time.perf_counter()
                    yield {e: self._weights((layer, e), slot) for e, slot in part.items()}
                    self._record(layer, list(part), start)
            finally:
                self._release(layer, order, slots)
        self._pending.pop(layer, None)

    def ready_slots(self, layer: int, wanted: list[int]) -> Iterator[dict[int, int]]:
        """Yield the slots of wanted experts by expert: at a time all that are ready.

        They are valid until the next are taken.

        Raises:
            TransferError: An expert's bytes did not arrive; the others are released.
        """
        order = self._requested(layer, wanted)
        take = self._next_together if self._waits_on_device else self._next
        while order:
            slots, start = take(layer, order), time.perf_counter()
            try:
                yield slots
                self._record(layer, list(slots), start)
            finally:
                self._release(layer, order, slots)
        self._pending.pop(layer, None)

    def look_up(self, layer: int, experts_TK: Tensor) -> SlotTable | None:
        """Return where a layer's experts are, to be looked up on their device.

        None: the host has to know the choice and to ask for `ready_slots`.
        """
        if self._resident is None or not self._is_looked_up:
            return None
        return self._resident.look_up(layer, experts_TK)

    def pin(self, layer: int, expert: int) -> ExpertWeights:
        """Return one expert's parameters, for experts modules that run their own loop.

        They stay valid until the model requests its next expert.

        Raises:
            TransferError: The expert's bytes did not arrive.
        """
        if self._pinned != (layer, expert):
            self._unpin()
            order = self._pending.get(layer)
            if order is None or expert not in order:
                order = self._request(layer, {expert: 1})
            if not self._is_complete:
                self.cache.make_room(layer, expert, sorted(order))
                self.loop.wait_for(self.cache, layer, [expert])
                self._pinned = layer, expert
            order.remove(expert)
        return self._weights((layer, expert), self._slot((layer, expert)))

    def _unpin(self) -> None:
        if self._pinned is not None:
            pinned, self._pinned = self._pinned, None
            _, ring = self._tops[self.cache.computing_tier(pinned)]
            ring.computed([self._slot(pinned)])
            self.cache.release(pinned)

    def _next(self, layer: int, pending: list[int]) -> dict[int, int]:
        """Return the experts to compute next with the slot of each, once there is one.

        They are all the pending ones that are ready if none of the others needs a slot; else the
        first that is ready, so that its slot is free soon. Where the system does not reorder they
        are all of them or the first.

        Raises:
            TransferError: An expert could not be read.
        """
        if self._is_complete:
            return {e: self._slot((layer, e)) for e in pending}
        ready = self._find_ready(layer, pending)
        if len(ready) == len(pending):
            for e in pending:
                self.cache.request((layer, e))
            return ready
        candidates = self.cache.next_candidates(layer, pending)
        if ready and len(candidates) > 1:
            if all(self.cache.entry((layer, e)) is not None for e in pending):
                return ready
            e = next(iter(ready))
            return {e: ready[e]}
        e = self.loop.wait_for(self.cache, layer, candidates)
        return {e: self._slot((layer, e))}

    def _next_together(self, layer: int, pending: list[int]) -> dict[int, int]:
        """Return all pending experts that have a slot, for one launch.

        It waits on the device for those that are being copied, so that their number changes nothing
        for the host. Where the system requests one after another, so does this, and all keep their
        slots until the launch: a policy that would have evicted one of them chooses another victim.
        """
        slots: dict[int, int] = {}
        for e in [] if self._is_complete else pending:
            self.cache.request((layer, e))
            while self.cache.entry((layer, e)) is None:
                self.pump()
                if not self.loop.join_prefetch(layer):
                    break
            if self.cache.entry((layer, e)) is not None:
                self.loop.wait_for(self.cache, layer, [e])
                slots[e] = self._slot((layer, e))
        return slots or self._next(layer, pending)

    def _find_ready(self, layer: int, experts: Sequence[int]) -> dict[int, int]:
        is_ready = self.cache.is_ready
        return {e: self._slot((layer, e)) for e in experts if is_ready((layer, e))}

    def _release(self, layer: int, order: list[int], slots: dict[int, int]) -> None:
        """Release experts that have been computed."""
        if self._pending.get(layer) is not order:
            return  # the step has ended in an error, and with it their requests
        if not self._is_complete:
            tier_of = self.cache.computing_tier
            for tier, (_, ring) in self._tops.items():
                own = [slot for e, slot in slots.items() if tier_of((layer, e)) is tier]
                if own:
                    ring.computed(own)
        for e in slots:
            order.remove(e)
            if not self._is_complete:
                self.cache.release((layer, e))
        if order:
            self.pump()

    def _weights(self, expert: Expert, slot: int) -> ExpertWeights:
        arena, _ = self._tops[self.cache.computing_tier(expert)]
        return arena.weights(expert[0], slot)

    def _slot(self, expert: Expert) -> int:
        entry = self.cache.entry(expert)
        assert entry is not None
        return entry.slot

    # ---- misses computed in host memory

    def _on_host(self, layer: int) -> list[int]:
        return [] if self._host_compute is None else self._host_compute.waiting(layer)

    def _in_host_memory(self, layer: int) -> Iterator[dict[int, ExpertWeights]]:
        """Yield the experts that are computed in host memory, while others are copied."""
        for e in self._on_host(layer):
            assert self._host_compute is not None
            start = time.perf_counter()
            try:
                yield {e: self._host_compute.weights(layer, e)}
            finally:
                self._record(layer, [e], start)
                self._host_compute.computed(layer, e, self._experts_done_at - start)
                self.pump()

    # ---- timeline and statistics

    def _record(self, layer: int, experts: Sequence[int], start: float) -> None:
        """Report experts that were computed, together as if one after another."""
        self._experts_done_at = time.perf_counter()
        if self.loop.timeline is not None:
            times = np.linspace(start, self._experts_done_at, len(experts) + 1).tolist()
            for e, (begin, end) in zip(experts, pairwise(times), strict=True):
                self.loop.timeline.computed((layer, e), begin, end)

    def swap_timeline(self, timeline: TimelineSink | None) -> TimelineSink | None:
        """Report spans to `timeline` from now on; returns the previous one."""
        before, self.loop.timeline = self.loop.timeline, timeline
        self.driver.timeline = timeline
        return before

    def _refuse_if_closed(self) -> None:
        if self._closed:
            self._forward_lock.end()  # `close` waits for it in another thread
            raise CheckpointError("this model was closed; load it again")

    def close(self) -> None:
        """End the rings, close the files and complete the timeline. May be called twice.

        A step that another thread computes fails at its next layer, before they end.
        """
        self._closed = True
        self._forward_lock.begin()
        with contextlib.ExitStack() as last:  # whatever fails, the others are closed
            last.callback(self._forward_lock.end)
            if self.loop.timeline is not None:
                last.callback(self.loop.timeline.close)
            last.callback(self.loop.close)
            self.driver.close()

    @property
    def arena_bytes(self) -> int:
        """Memory for experts in all tiers, with the buffers for conversion and decoding."""
        return (
            sum(arena.num_bytes for arena in self.arenas)
            + self.store.scratch_bytes
            + max_decoded_bytes(self.store)
        )

    def move_when_idle(self) -> bool:
        """Go on with transfers between two forward passes; returns whether any is under way."""
        self._forward_lock.begin()
        try:
            if self._is_intact and not self._closed:
                self.loop.pump(is_idle=True)
            return self.loop.is_moving
        finally:
            self._forward_lock.end()

    def report(self) -> dict[str, Any]:
        """Return counters of the policy core, times (seconds) and memory (bytes)."""
        if self._resident is not None:
            self._resident.count()
        counters, payoff = sum_counters(self.cache.counters), self.payoff
        drift = self.driver.drift_report
        return {
            **counters.as_dict(),
            "bytes_prefetched_unused_yet": self.cache.pending_bytes,
            **counters.rates(),
            "predictor_seconds": self.driver.seconds,
            "predictor_failures": self.driver.failures,
            "predictor_drift": None if drift is None else asdict(drift),
            "arena_bytes": self.arena_bytes,
            "arena_slots": self.cache.num_slots,
            "lower_tiers": {
                link.name: sum_counters(link.tier.counters).as_dict()
                for link in self.loop.links
                if not link.tier.is_top
            },
            "adaptive_prefetch": None
            if payoff is None
            else {"prefetching": payoff.is_on, "switches": payoff.num_switches},
            "lost_threads": self.loop.num_hanging,
            "stall_seconds": self.loop.stall_seconds,
            **self.stats.as_dict(),
        }
