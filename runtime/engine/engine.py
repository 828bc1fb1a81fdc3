"""Ties the policy core to real memory, real transfers and a running model."""

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from predictors.base import Floats, Ints
from runtime.engine.driver import PredictorDriver
from runtime.engine.stats import StepStats
from runtime.errors import CheckpointError, TransferError
from runtime.policy.eviction.protocol import Expert
from runtime.policy.multi_device_cache import DeviceCaches
from runtime.policy.placement import ExpertPlacement
from runtime.store.base import ExpertStore, max_decoded_bytes
from runtime.transfer.arena import Arena
from runtime.transfer.link import ComputeTier
from runtime.transfer.timeline import TimelineSink
from runtime.transfer.worker import TransferState, TransferThread, TransferWorker

STUCK_SECONDS = 30.0
"""A computation that waits while nothing is under way for so long will never go on."""


class Engine:
    """The model's events go in (a probes' `Listener`), experts come out when they are ready.

    Args:
        arenas: the one that computes first, as for `workers`; with several devices those of
            the first, then those of the next, as `cache.tiers` are.
        placement: which of several devices an expert belongs to.
        watchdog_seconds: a transfer that takes longer is taken for hung.
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
        self._devices = ComputeTier(
            [arena for arena, _ in tops], [link for _, link in tops], placement or ExpertPlacement()
        )
        self._bottoms = [worker for worker in self.workers if worker.tier.below is None]
        self._num_experts = store.num_experts
        self._shared = shared
        self._condition = shared.condition
        self._timeline = shared.timeline
        self._watchdog_seconds = watchdog_seconds
        self._turn = ForwardPassLock()
        self._hand = TransferThread(f"{self.workers[-1].name}, read by the computation")
        self._held: Expert | None = None
        """What `pin` gave last and has not taken back."""
        self._ordered: dict[int, list[int]] = {}
        """Layers whose router has spoken and whose experts are asked for."""
        self._requests: frozenset[int] = frozenset()
        """Whose tokens the last step computed."""
        self._since = time.perf_counter()
        """When the computation last turned to something else than routed experts."""
        self._closed = False
        self._is_intact = True
        """No step is under way, and the last one ended as steps do."""
        for worker in self.workers:
            worker.start()

    # ---- a probes' listener

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        self._turn.begin()
        requests = frozenset(np.unique(requests_T).tolist())
        new_request = not requests <= self._requests
        self._requests = requests
        with self._condition:
            if not self._is_intact:
                self._repair()
            self._is_intact = False
            self._let_go()
            self._abandon_leftovers()
            self.cache.begin_step(new_request=new_request)
            for worker in self.workers:
                worker.look_after(float("inf"))
        is_prefill = new_request or len(tokens_T) > len(requests)
        self.stats.begin_step(len(tokens_T), is_prefill=is_prefill)
        self._since = time.perf_counter()
        self.driver.begin_step(tokens_T, requests_T)

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        self.driver.layer_input(layer, hidden_TD)

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        self.driver.gate_input(layer, hidden_TD)

    def routed(
        self, layer: int, experts_TK: Ints, logits_TE: Floats | None, _weights_TK: Floats | None
    ) -> None:
        self.driver.before_demand(layer, experts_TK)
        wanted, counts = np.unique(experts_TK, return_counts=True)
        tokens_per_expert = dict(zip(wanted.tolist(), counts.tolist(), strict=True))
        last = self._num_experts
        self._demand(layer, {e: n for e, n in tokens_per_expert.items() if 0 <= e < last})
        self._clock_layer(layer)
        self.driver.routed(layer, experts_TK, logits_TE)

    def partly_routed(self, layer: int, experts_TK: Ints) -> None:
        """A part of the step's tokens has been routed, the others have yet to reach the layer."""
        experts = np.unique(experts_TK)
        experts = experts[(experts >= 0) & (experts < self._num_experts)]
        with self._condition:
            self._forget_failures(layer, self.cache.request_early(layer, experts.tolist()))
            self._condition.notify_all()

    def failed(self, layer: int) -> frozenset[int]:
        """The layer's experts whose bytes did not arrive when they were last asked for."""
        with self._condition:
            return frozenset(e for one, e in self._shared.errors if one == layer)

    def _clock_layer(self, layer: int) -> None:
        if self._timeline is not None:
            self._timeline.between(layer, self._since, time.perf_counter())

    def end_step(self) -> None:
        if not self._turn.is_mine:
            return  # the step never began: its input was refused
        try:
            self._end_step()
        finally:
            # Last: another thread's step begins at once, and what it asks for is its own.
            self._turn.end()

    def _end_step(self) -> None:
        self.driver.end_step()
        step = self.stats.end_step()
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, Exception):
            return  # Ctrl-C may have cut the bookkeeping short: the next step repairs it
        with self._condition:
            self._let_go()
            self._abandon_leftovers()
            self.cache.end_step()
        self._is_intact = True
        if step is None:
            return
        if self._shared.adaptive_prefetch is not None and not step.is_prefill:
            self._shared.adaptive_prefetch.record_step(step.end - step.start)
        if self._timeline is not None:
            self._timeline.step(step.num_tokens, step.start, step.end)

    def _repair(self) -> None:
        self._held = None
        self._ordered.clear()
        self._hand.task = None
        self.cache.repair([worker.under_way for worker in self.workers])

    # ---- experts for the model

    def _demand(self, layer: int, tokens_per_expert: dict[int, int]) -> list[int]:
        if self._closed:
            raise CheckpointError("this model was closed; load it again")
        with self._condition:
            self._let_go()
            self._abandon_leftovers()
            early = self.cache.requested_early(layer)
            self._forget_failures(layer, [e for e in tokens_per_expert if e not in early])
            order = self.cache.request_routed(layer, tokens_per_expert)
            self._ordered[layer] = order
            self._condition.notify_all()
        return order

    def _forget_failures(self, layer: int, asked: Iterable[int]) -> None:
        """Of experts that are asked for anew: what was tried before says nothing of now."""
        under_way = {task.expert for worker in self.workers for task in worker.under_way}
        for e in asked:
            self._shared.errors.pop((layer, e), None)
            if (layer, e) in under_way:
                self._shared.joined.add((layer, e))

    def _abandon_leftovers(self) -> None:
        """What a layer asked for and never computed, because its forward pass ended in an
        exception or its block left an expert out, must not hold slots that the next one needs.
        """
        for layer, order in self._ordered.items():
            self.cache.cancel(layer, order)
        self._ordered.clear()

    def ready(self, layer: int, wanted: list[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The wanted experts, each when it is ready; the slot is held until the next is taken.

        Raises:
            TransferError: an expert's bytes did not arrive; the others are given back.
        """
        order = self._ordered.get(layer)
        if order is None or sorted(order) != wanted:
            # No router was seen, or the block changed what it chose: what arrives here is right.
            order = self._demand(layer, dict.fromkeys(wanted, 1))
        while order:
            expert, slot = self._wait(layer, order)
            start = time.perf_counter()
            try:
                yield expert, self._devices.weights((layer, expert), slot)
            finally:
                order.remove(expert)
                self._devices.computed((layer, expert), slot)
                self._since = time.perf_counter()
                if self._timeline is not None:
                    self._timeline.computed((layer, expert), start, self._since)
                self._give_back((layer, expert))
        with self._condition:
            self._ordered.pop(layer, None)

    def _give_back(self, expert: Expert) -> None:
        with self._condition:
            self.cache.release(expert)
            if any(len(tier.queue) for tier in self.cache.tiers):
                self._condition.notify_all()  # somebody may wait for the slot

    def pin(self, layer: int, expert: int) -> dict[str, Tensor]:
        """One expert's parameters, for experts modules that run their own loop.

        They stay valid until the next expert of the model is asked for.

        Raises:
            TransferError: the expert's bytes did not arrive.
        """
        if self._held == (layer, expert):
            entry = self.cache.entry(self._held)
            assert entry is not None
            return self._devices.weights(self._held, entry.slot)
        with self._condition:
            self._let_go()
        order = self._ordered.get(layer)
        if order is None or expert not in order:
            order = self._demand(layer, {expert: 1})
        _, slot = self._wait(layer, [expert])
        order.remove(expert)
        self._held = layer, expert
        return self._devices.weights(self._held, slot)

    def _let_go(self) -> None:
        if self._held is None:
            return
        entry = self.cache.entry(self._held)
        assert entry is not None
        self._devices.computed(self._held, entry.slot)
        self.cache.release(self._held)
        self._condition.notify_all()
        self._held = None

    def _wait(self, layer: int, pending: list[int]) -> tuple[int, int]:
        """The next expert to compute and its slot: the first that is ready, or strictly the first
        where the system does not reorder.

        Raises:
            TransferError: one of them could not be read, or nothing is on its way any more.
        """
        techniques = self.cache.techniques
        is_free = techniques.reordered and techniques.early_preemption
        candidates = pending if is_free else pending[:1]
        with self._condition:
            self.cache.request((layer, pending[0]))
            if len(candidates) == 1:
                coming = pending if len(pending) > 1 else sorted(self._ordered[layer])
                if self.cache.make_room(layer, candidates[0], coming):
                    self._condition.notify_all()
            slot = self._first_ready(layer, candidates)
            if slot is None:
                start = time.perf_counter()
                slot = self._wait_for(layer, candidates)
                end = time.perf_counter()
                self.stats.stall_seconds += end - start
                if self._timeline is not None:
                    self._timeline.stalled(layer, start, end)
            return slot

    def _first_ready(self, layer: int, candidates: Sequence[int]) -> tuple[int, int] | None:
        for e in candidates:
            if self.cache.is_ready((layer, e)):
                entry = self.cache.entry((layer, e))
                assert entry is not None
                return e, entry.slot
        return None

    def _wait_for(self, layer: int, candidates: Sequence[int]) -> tuple[int, int]:
        condition = self._condition
        patience = self._watchdog_seconds / 2
        checked = active = time.monotonic()
        while True:
            found = self._first_ready(layer, candidates)
            if found is not None:
                return found
            for e in candidates:
                if (error := self._shared.errors.get((layer, e))) is not None:
                    raise error
            num_lost = sum(worker.num_lost for worker in self._bottoms)
            if any(worker.is_frozen for worker in self._bottoms):
                raise TransferError(
                    f"layer {layer}: {num_lost} reads of experts have hung for more than "
                    f"{self._watchdog_seconds} s; the disk does not answer: check it and ask again"
                )
            # Where a read hangs, another one by this thread could hang as well, and nobody watches.
            if not num_lost and any(worker.help(self._hand) for worker in self._bottoms):
                active = time.monotonic()
                continue
            condition.wait(patience)
            now = time.monotonic()
            if now - checked >= patience:
                checked = now
                for worker in self.workers:
                    worker.look_after(self._watchdog_seconds)
            if not all(worker.is_idle for worker in self.workers):
                active = now
            elif now - active > STUCK_SECONDS:
                raise TransferError(
                    f"layer {layer}: experts {list(candidates)} are not here and nothing brings "
                    "them; this is a fault of moecast: load the model again and report it"
                )

    def tell(self, timeline: TimelineSink | None) -> TimelineSink | None:
        """Another timeline, or none, hears what happens from now on; the one that did so far."""
        with self._condition:
            before, self._timeline = self._timeline, timeline
            self._shared.timeline = timeline
        return before

    def close(self) -> None:
        """Ends the workers, closes the files, completes the timeline; may be called twice."""
        self._closed = True
        for worker in self.workers:
            worker.close(timeout_seconds=self._watchdog_seconds)
        if self._timeline is not None:
            self._timeline.close()

    # ---- what a run can be asked

    @property
    def arena_bytes(self) -> int:
        """All the memory that experts take, in every tier."""
        return (
            sum(arena.num_bytes for arena in self.arenas)
            + self.store.scratch_bytes
            + max_decoded_bytes(self.store)
        )

    def report(self) -> dict[str, Any]:
        """Counters of the policy core, times and memory."""
        with self._condition:
            counters = self.cache.total_counters()
            pending = self.cache.pending_bytes
            below = {
                worker.name: worker.tier.total_counters().as_dict()
                for worker in self.workers
                if not worker.tier.is_top
            }
        adaptive_prefetch = self._shared.adaptive_prefetch
        return {
            **counters.as_dict(),
            "bytes_prefetched_unused_yet": pending,
            "hit_rate": counters.hit_rate,
            "fetch_rate": counters.fetch_rate,
            "joint_rate": counters.joint_rate,
            "predictor_seconds": self.driver.seconds,
            "arena_bytes": self.arena_bytes,
            "arena_slots": self.cache.num_slots,
            "lower_tiers": below,
            "adaptive_prefetch": None if adaptive_prefetch is None else adaptive_prefetch.as_dict(),
            "lost_threads": sum(worker.num_lost for worker in self.workers),
            **self.stats.as_dict(),
        }


class ForwardPassLock:
    """A lock that a forward pass takes in one hook and gives back in another.

    A pass may begin within a pass of its own thread (an encoder within its model).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0

    def begin(self) -> None:
        """Waits until no other thread's pass is under way."""
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the turn; not when its pass never began."""
        return self._owner == threading.get_ident()

    def end(self) -> None:
        """Gives the turn back, which this thread must have."""
        assert self.is_mine
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
        self._lock.release()
