"""The engine: runs the policy core on a model's events with real memory and transfers."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.ma  # np.unique imports it at its first call, when there may be no descriptor left

from predictors.base import Floats, Ints
from runtime.engine.driver import PredictorDriver
from runtime.engine.forecast_payoff import ForecastPayoff
from runtime.engine.forward_pass_lock import ForwardPassLock, release_held
from runtime.engine.host_compute import HostCompute
from runtime.engine.stats import StepStats
from runtime.errors import CheckpointError, TransferError
from runtime.policy.counters import CacheCounters, sum_counters
from runtime.policy.eviction.protocol import Expert
from runtime.policy.multi_device_cache import DeviceCaches
from runtime.policy.placement import ExpertPlacement
from runtime.store.base import ExpertStore, max_decoded_bytes
from runtime.store.packed.matrix import ExpertWeights
from runtime.transfer.link import Arena, ComputeTier
from runtime.transfer.timeline import TimelineSink
from runtime.transfer.worker import TransferState, TransferThread, TransferWorker

STUCK_SECONDS = 30.0
"""A computation that waits this long while no transfer is active is reported as stuck."""


class Engine:
    """Receives a model's events and provides its experts as soon as their bytes have arrived.

    Args:
        arenas: in the order of `workers` and `cache.tiers`: by device, the computing tier first.
        placement: maps experts to devices.
        host_compute: chooses missed experts to compute in the second arena; None: all are copied.
        watchdog_seconds: transfers that take longer count as hung.
    """

    def __init__(
        self,
        *,
        store: ExpertStore,
        arenas: Sequence[Arena],
        cache: DeviceCaches,
        workers: Sequence[TransferWorker],
        shared: TransferState,
        driver: PredictorDriver,
        watchdog_seconds: float,
        placement: ExpertPlacement | None = None,
        host_compute: HostCompute | None = None,
    ):
        self.store = store
        self.arenas = tuple(arenas)
        self.cache = cache
        self.workers = tuple(workers)
        self.driver = driver
        self.stats = StepStats()
        tops = [
            (arena, worker.link)
            for arena, worker in zip(self.arenas, self.workers, strict=True)
            if worker.tier.is_top
        ]
        self._compute_tier = ComputeTier(
            [arena for arena, _ in tops], [link for _, link in tops], placement or ExpertPlacement()
        )
        self._store_workers = [worker for worker in self.workers if worker.tier.below is None]
        self._num_experts = store.num_experts
        self._shared = shared
        self._condition = shared.condition
        self._timeline = shared.timeline
        self._watchdog_seconds = watchdog_seconds
        self._forward_lock = ForwardPassLock()
        self._inline_thread = TransferThread(f"{self.workers[-1].name}, inline")
        self._pinned: Expert | None = None
        """Expert that `pin` returned last and that is still pinned."""
        self._pending: dict[int, list[int]] = {}
        """Requested experts by layer that have not been computed yet."""
        self._host_compute = host_compute
        self._requests: frozenset[int] = frozenset()
        """Requests whose tokens the last step computed."""
        self._num_tokens = 0
        """Tokens of the step."""
        self._is_complete = False
        """The step began with every expert in its place: nothing is requested or transferred, and
        no lock is needed."""
        self._experts_done_at = time.perf_counter()
        """Time at which the last routed expert was computed."""
        self.payoff: ForecastPayoff | None = None
        """Turns forecasting off where it does not pay; None: it is always on."""
        if cache.system.adaptive:
            self.payoff = ForecastPayoff(
                driver,
                counters=lambda: cache.counters,
                link_seconds=lambda: sum(w.busy_seconds for w in self.workers if w.tier.is_top),
                stall_seconds=lambda: self.stats.stall_seconds,
                on_change=cache.set_idle_prefetch if cache.system.idle_prefetch else lambda _: None,
            )
        self._closed = False
        self._is_intact = True
        """False during a step, and after one that did not end properly."""
        if cache.system.prefetch:
            cache.fill_when_idle()
        for worker in self.workers:
            worker.start()
        if cache.system.fill_first_layers:
            self._fill(cache.first_experts())

    def _fill(self, first_experts: Sequence[Sequence[Expert]]) -> None:
        """Read the experts that each tier begins with (MoE-Infinity, sequence level, section 6.1).

        The computing tiers come first: what passes through host memory leaves it again. Experts
        that cannot be read are left out.
        """
        for tier, experts in zip(self.cache.tiers, first_experts, strict=True):
            with self._condition:
                for expert in experts:
                    tier.request(expert)
                self._condition.notify_all()
                coming = list(experts)
                while coming:
                    if tier.is_ready(coming[-1]) or coming[-1] in self._shared.errors:
                        coming.pop()
                        continue
                    if any(worker.num_lost for worker in self.workers):
                        break  # a read hangs and its slot is set aside
                    self._condition.wait(self._watchdog_seconds / 2)
                    for worker in self.workers:
                        worker.check_threads(self._watchdog_seconds)
                for expert in experts:
                    tier.release(expert)
                tier.counters = [CacheCounters() for _ in tier.counters]

    # ---- events of the model (`EventListener`)

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        self._forward_lock.begin()
        release_held(self._condition)
        requests = frozenset(np.unique(requests_T).tolist())
        new_request = not requests <= self._requests
        self._requests = requests
        self._num_tokens = len(tokens_T)
        with self._condition:
            if not self._is_intact:
                self._pinned = None
                self._pending.clear()
                if self._host_compute is not None:
                    self._host_compute.forget()
                self._inline_thread.task = None
                self.cache.repair([worker.active_tasks for worker in self.workers])
            self._is_intact = False
            self._unpin()
            self._cancel_leftovers()
            self._is_complete = self.cache.is_complete
            if not self._is_complete:
                self.cache.begin_step(requests_T)
                for worker in self.workers:
                    worker.check_threads(float("inf"))
        is_prefill = new_request or len(tokens_T) > len(requests)
        self.stats.begin_step(len(tokens_T), is_prefill=is_prefill)
        self._experts_done_at = time.perf_counter()
        self.driver.begin_step(tokens_T, requests_T, is_decode=not is_prefill)

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        self.driver.layer_input(layer, hidden_TD)

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        self.driver.gate_input(layer, hidden_TD)

    def routed(
        self, layer: int, experts_TK: Ints, logits_TE: Floats | None, _weights_TK: Floats | None
    ) -> None:
        self.driver.before_request(layer, experts_TK)
        self._request(layer, count_tokens(experts_TK, self._num_experts), experts_TK)
        if self._timeline is not None:
            self._timeline.computed_dense(layer, self._experts_done_at, time.perf_counter())
        self.driver.routed(layer, experts_TK, logits_TE)

    def partly_routed(self, layer: int, experts_TK: Ints) -> None:
        """Request experts of those of the step's tokens that have reached the layer's router."""
        if self._is_complete:
            return
        experts = np.unique(experts_TK)
        experts = experts[(experts >= 0) & (experts < self._num_experts)]
        with self._condition:
            self._forget_failures(layer, self.cache.request_early(layer, experts.tolist()))
            self._condition.notify_all()

    def failed_experts(self, layer: int) -> frozenset[int]:
        """Return the layer's experts whose last request failed."""
        with self._condition:
            return frozenset(e for error_layer, e in self._shared.errors if error_layer == layer)

    def end_step(self) -> None:
        # Ctrl-C may arrive after a lock was acquired and before the block that releases it.
        release_held(self._condition)
        if not self._forward_lock.is_mine:
            self._forward_lock.release_held()
            return  # the step did not begin: its input was rejected
        try:
            self._end_step()
        finally:
            # Last, because another thread's step may begin immediately.
            self._forward_lock.end()

    def _end_step(self) -> None:
        self.driver.end_step()
        step = self.stats.end_step()
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, Exception):
            return  # Ctrl-C may have interrupted the bookkeeping; the next step repairs it
        with self._condition:
            self._unpin()
            self._cancel_leftovers()
            if not self._is_complete:
                self.cache.end_step()
        self._is_intact = True
        if step is None:
            return
        if self._host_compute is not None and not step.is_prefill:
            self._host_compute.switch.record_step(step.end - step.start)
        if self.payoff is not None:
            self.payoff.record_step(step.end - step.start, is_decode=not step.is_prefill)
        if self._timeline is not None:
            self._timeline.step(step.num_tokens, step.start, step.end)

    # ---- experts for the model (`ExpertSource`)

    def _request(
        self, layer: int, tokens_per_expert: dict[int, int], experts_TK: Ints | None = None
    ) -> list[int]:
        if self._closed:
            raise CheckpointError("this model was closed; load it again")
        if self._is_complete:
            self.cache.count_routed(layer, tokens_per_expert)
            order = self._pending[layer] = list(tokens_per_expert)
            return order
        with self._condition:
            self._unpin()
            self._cancel_leftovers()
            early = self.cache.requested_early(layer)
            self._forget_failures(layer, [e for e in tokens_per_expert if e not in early])
            if experts_TK is not None and len(experts_TK) == self._num_tokens:
                self.cache.on_tokens_routed(layer, experts_TK)
            cache = self._host_compute or self.cache
            order = self._pending[layer] = cache.request_routed(layer, tokens_per_expert)
            self._wake_workers()
        return order

    def _wake_workers(self) -> None:
        """Notify the workers if one may have something to transfer; called under the lock."""
        if any(tier.may_start() for tier in self.cache.tiers):
            self._condition.notify_all()

    def _forget_failures(self, layer: int, requested: Iterable[int]) -> None:
        """Drop earlier errors of newly requested experts, so that they are read again."""
        active = {task.expert for worker in self.workers for task in worker.active_tasks}
        if not (active or self._shared.errors):
            return
        for e in requested:
            self._shared.errors.pop((layer, e), None)
            if (layer, e) in active:
                self._shared.joined.add((layer, e))

    def _cancel_leftovers(self) -> None:
        """Cancel requests that were never computed, so that they occupy no slots.

        A forward pass may end in an exception, and a block may skip an expert.
        """
        for layer, order in self._pending.items():
            self.cache.cancel(layer, order)
        self._pending.clear()
        if self._host_compute is not None:
            self._host_compute.cancel()

    def ready(self, layer: int, wanted: list[int]) -> Iterator[tuple[int, ExpertWeights]]:
        """Yield the wanted experts, each when it is ready; valid until the next is taken.

        Raises:
            TransferError: an expert's bytes did not arrive; the others are released.
        """
        order = self._pending.get(layer)
        if order is None or sorted([*order, *self._on_host(layer)]) != wanted:
            # The layer has no probed router, or its block changed the choice: `wanted` is right.
            order = self._request(layer, dict.fromkeys(wanted, 1))
        if self._is_complete:
            yield from self._in_place(layer, order)
            return
        while order:
            if self._on_host(layer) and self._find_ready(layer, order) is None:
                yield from self._in_host_memory(layer)
            computed: list[Expert] = []
            try:
                for expert, slot in self._wait(layer, order):
                    start = time.perf_counter()
                    try:
                        yield expert, self._compute_tier.weights((layer, expert), slot)
                    finally:
                        order.remove(expert)
                        computed.append((layer, expert))
                        self._compute_tier.computed((layer, expert), slot)
                        self._experts_done_at = time.perf_counter()
                        if self._timeline is not None:
                            self._timeline.computed((layer, expert), start, self._experts_done_at)
            finally:
                self._release(computed)
        yield from self._in_host_memory(layer)
        with self._condition:
            self._pending.pop(layer, None)

    def _in_place(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, ExpertWeights]]:
        """Yield experts of a complete cache."""
        for e in experts:
            start = time.perf_counter()
            yield e, self._resident_weights((layer, e))
            self._experts_done_at = time.perf_counter()
            if self._timeline is not None:
                self._timeline.computed((layer, e), start, self._experts_done_at)
        self._pending.pop(layer, None)

    def _in_host_memory(self, layer: int) -> Iterator[tuple[int, ExpertWeights]]:
        """Yield the experts that are computed in host memory, while others are copied."""
        for e in self._on_host(layer):
            assert self._host_compute is not None
            start = time.perf_counter()
            try:
                yield e, self._host_compute.weights(layer, e)
            finally:
                self._experts_done_at = time.perf_counter()
                with self._condition:
                    self._host_compute.computed(layer, e, self._experts_done_at - start)
                if self._timeline is not None:
                    self._timeline.computed((layer, e), start, self._experts_done_at)

    def _on_host(self, layer: int) -> list[int]:
        return [] if self._host_compute is None else self._host_compute.waiting(layer)

    def ready_slots(self, layer: int, wanted: list[int]) -> Iterator[dict[int, int]]:
        """Yield the slots of wanted experts by expert: at a time all that are ready.

        They are valid until the next are taken.

        Raises:
            TransferError: an expert's bytes did not arrive; the others are released.
        """
        order = self._pending.get(layer)
        if order is None or sorted(order) != wanted:
            order = self._request(layer, dict.fromkeys(wanted, 1))
        while order:
            if self._is_complete:
                slots = {e: self._resident_slot((layer, e)) for e in order}
            else:
                slots = dict(self._wait(layer, order))
            start = time.perf_counter()
            try:
                yield slots
            finally:
                for e in slots:
                    order.remove(e)
                self._record_together(layer, list(slots), start)
                if not self._is_complete:
                    for e, slot in slots.items():
                        self._compute_tier.computed((layer, e), slot)
                    self._release([(layer, e) for e in slots])
        self._pending.pop(layer, None)

    def _record_together(self, layer: int, experts: Sequence[int], start: float) -> None:
        """Report experts that were computed together as if one after another."""
        self._experts_done_at = time.perf_counter()
        if self._timeline is not None:
            times = np.linspace(start, self._experts_done_at, len(experts) + 1).tolist()
            for e, (begin, end) in zip(experts, pairwise(times), strict=True):
                self._timeline.computed((layer, e), begin, end)

    def _resident_slot(self, expert: Expert) -> int:
        entry = self.cache.entry(expert)
        assert entry is not None
        return entry.slot

    def _resident_weights(self, expert: Expert) -> ExpertWeights:
        return self._compute_tier.weights(expert, self._resident_slot(expert))

    def _release(self, experts: Sequence[Expert]) -> None:
        with self._condition:
            for expert in experts:
                self.cache.release(expert)
            if any(len(tier.queue) for tier in self.cache.tiers):
                self._condition.notify_all()  # a worker may wait for a slot

    def pin(self, layer: int, expert: int) -> ExpertWeights:
        """Return one expert's parameters, for experts modules that run their own loop.

        They stay valid until the model requests its next expert.

        Raises:
            TransferError: the expert's bytes did not arrive.
        """
        if self._pinned == (layer, expert):
            return self._resident_weights(self._pinned)
        with self._condition:
            self._unpin()
        order = self._pending.get(layer)
        if order is None or expert not in order:
            order = self._request(layer, {expert: 1})
        if self._is_complete:
            order.remove(expert)
            return self._resident_weights((layer, expert))
        ((_, slot),) = self._wait(layer, [expert])
        order.remove(expert)
        self._pinned = layer, expert
        return self._compute_tier.weights(self._pinned, slot)

    def _unpin(self) -> None:
        if self._pinned is None:
            return
        entry = self.cache.entry(self._pinned)
        assert entry is not None
        self._compute_tier.computed(self._pinned, entry.slot)
        self.cache.release(self._pinned)
        self._condition.notify_all()
        self._pinned = None

    def _wait(self, layer: int, pending: list[int]) -> list[tuple[int, int]]:
        """Return the next experts to compute, and the slot of each.

        They are all the pending ones that are ready if none of the others needs a slot; else the
        first that is ready, so that its slot is free soon. Where the system does not reorder they
        are all of them or the first.

        Raises:
            TransferError: an expert could not be read, or no transfer of it is pending.
        """
        system = self.cache.system
        is_free = system.reordered and system.early_preemption
        with self._condition:
            entries = [self.cache.entry((layer, e)) for e in pending]
            are_ready = [self.cache.is_ready((layer, e)) for e in pending]
            if all(are_ready):
                for e in pending:
                    self.cache.request((layer, e))
            elif not is_free or len(pending) == 1:
                return [self._wait_for_next(layer, pending)]
            if None in entries or not any(are_ready):
                return [self._wait_for_any(layer, pending)]
            return [
                (e, entry.slot)
                for e, entry, is_ready in zip(pending, entries, are_ready, strict=True)
                if is_ready and entry is not None
            ]

    def _wait_for_next(self, layer: int, pending: Sequence[int]) -> tuple[int, int]:
        """Return the first pending expert and its slot, for which room is made."""
        self.cache.request((layer, pending[0]))
        coming = pending if len(pending) > 1 else sorted(self._pending[layer])
        self.cache.make_room(layer, pending[0], coming)
        self._wake_workers()  # this thread itself reads from the disk only
        return self._wait_for_any(layer, pending[:1])

    def _wait_for_any(self, layer: int, candidates: Sequence[int]) -> tuple[int, int]:
        """Return the first candidate that is ready and its slot, at once or when one is."""
        ready = self._find_ready(layer, candidates)
        if ready is None:
            start = time.perf_counter()
            ready = self._wait_until_ready(layer, candidates)
            end = time.perf_counter()
            self.stats.stall_seconds += end - start
            if self._timeline is not None:
                self._timeline.stalled(layer, start, end)
        return ready

    def _find_ready(self, layer: int, candidates: Sequence[int]) -> tuple[int, int] | None:
        for e in candidates:
            if self.cache.is_ready((layer, e)):
                entry = self.cache.entry((layer, e))
                assert entry is not None
                return e, entry.slot
        return None

    def _wait_until_ready(self, layer: int, candidates: Sequence[int]) -> tuple[int, int]:
        condition = self._condition
        patience = self._watchdog_seconds / 2
        checked = active = time.monotonic()
        while True:
            ready = self._find_ready(layer, candidates)
            if ready is not None:
                return ready
            for e in candidates:
                if (error := self._shared.errors.get((layer, e))) is not None:
                    raise error
            num_lost = sum(worker.num_lost for worker in self._store_workers)
            if any(worker.is_frozen for worker in self._store_workers):
                raise TransferError(
                    f"layer {layer}: {num_lost} reads of experts have hung for more than "
                    f"{self._watchdog_seconds} s; check the disk, then repeat the request"
                )
            # If a read hangs, an inline read by this thread could hang too, without a watchdog.
            if not num_lost and any(
                worker.run_inline(self._inline_thread) for worker in self._store_workers
            ):
                active = time.monotonic()
                continue
            if self.cache.displace_early(layer):
                condition.notify_all()
                continue
            condition.wait(patience)
            now = time.monotonic()
            if now - checked >= patience:
                checked = now
                for worker in self.workers:
                    worker.check_threads(self._watchdog_seconds)
            if not all(worker.is_idle for worker in self.workers):
                active = now
            elif now - active > STUCK_SECONDS:
                raise TransferError(
                    f"internal error: layer {layer}: experts {list(candidates)} were requested but "
                    "no transfer is pending. Reload the model and report this."
                )

    def swap_timeline(self, timeline: TimelineSink | None) -> TimelineSink | None:
        """Report spans to `timeline` from now on; returns the previous one."""
        with self._condition:
            before, self._timeline = self._timeline, timeline
            self._shared.timeline = timeline
        return before

    def close(self) -> None:
        """End the workers, close the files and complete the timeline. May be called twice."""
        self._closed = True
        self.driver.close()
        for worker in self.workers:
            worker.close(timeout_seconds=self._watchdog_seconds)
        if self._timeline is not None:
            self._timeline.close()

    # ---- statistics

    @property
    def arena_bytes(self) -> int:
        """Memory for experts in all tiers, with the buffers for conversion and decoding."""
        return (
            sum(arena.num_bytes for arena in self.arenas)
            + self.store.scratch_bytes
            + max_decoded_bytes(self.store)
        )

    @property
    def is_transferring(self) -> bool:
        """Whether a transfer runs or may start, be it in idle time."""
        with self._condition:
            return not all(worker.is_idle for worker in self.workers) or any(
                tier.may_start() for tier in self.cache.tiers
            )

    def report(self) -> dict[str, Any]:
        """Return counters of the policy core, times (seconds) and memory (bytes)."""
        with self._condition:
            counters = sum_counters(self.cache.counters)
            pending = self.cache.pending_bytes
            below = {
                worker.name: sum_counters(worker.tier.counters).as_dict()
                for worker in self.workers
                if not worker.tier.is_top
            }
        payoff, drift = self.payoff, self.driver.drift_report
        return {
            **counters.as_dict(),
            "bytes_prefetched_unused_yet": pending,
            **counters.rates(),
            "predictor_seconds": self.driver.seconds,
            "predictor_failures": self.driver.failures,
            "predictor_drift": None if drift is None else asdict(drift),
            "arena_bytes": self.arena_bytes,
            "arena_slots": self.cache.num_slots,
            "lower_tiers": below,
            "adaptive_prefetch": None
            if payoff is None
            else {"prefetching": payoff.is_on, "switches": payoff.num_switches},
            "lost_threads": sum(worker.num_lost for worker in self.workers),
            **self.stats.as_dict(),
        }


def count_tokens(experts_TK: Ints, num_experts: int) -> dict[int, int]:
    """Return the number of tokens of each chosen expert, ascending; other ids mean "skip"."""
    if len(experts_TK) > 1:
        experts, counts = np.unique(experts_TK, return_counts=True)
        pairs = zip(experts.tolist(), counts.tolist(), strict=True)
        return {e: n for e, n in pairs if 0 <= e < num_experts}
    chosen = experts_TK.ravel().tolist()
    return {e: chosen.count(e) for e in sorted(chosen) if 0 <= e < num_experts}
