"""Ties the policy core to real memory, real reads and a running model."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from predictors.base import Floats, Ints, Predictor
from runtime.driver import PredictorDriver
from runtime.errors import TransferError
from runtime.policy.eviction import Expert
from runtime.policy.planner import Planner, Urgency
from runtime.policy.prefetcher import Prefetcher, Task
from runtime.stats import Stats
from runtime.store.base import Store
from runtime.tiers.arena import Arena
from runtime.tiers.worker import Worker

WORKER_CHECK_SECONDS = 1.0
"""How often a waiting computation looks whether the worker still lives."""


class Engine:
    """The model's events go in (a probes' `Listener`), experts come out when they are ready."""

    def __init__(
        self,
        *,
        store: Store,
        arena: Arena,
        prefetcher: Prefetcher,
        predictor: Predictor | None,
        urgency: Urgency,
        top_k: int,
    ):
        self.store = store
        self._arena = arena
        self._prefetcher = prefetcher
        self._worker = Worker(prefetcher, self._fetch)
        planner = Planner(prefetcher, top_k=top_k, urgency=urgency)
        self.driver = PredictorDriver(predictor, planner, self._worker)
        self._held: Expert | None = None
        """What `hold` gave last and has not taken back."""
        self._ordered: dict[int, list[int]] = {}
        """Layers whose router has spoken and whose experts are asked for."""
        self.stats = Stats()

    def _fetch(self, task: Task) -> None:
        layer, expert = task.expert
        chunks = range(task.first_chunk, task.end_chunk)
        self.store.read(layer, expert, chunks, self._arena.slot(task.slot))

    # ---- a probes' listener

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        self._let_go()
        self._abandon_leftovers()
        self.stats.begin_step(len(tokens_T))
        self.driver.begin_step(tokens_T, requests_T)

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        self.driver.layer_input(layer, hidden_TD)

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        self.driver.gate_input(layer, hidden_TD)

    def routed(
        self, layer: int, experts_TK: Ints, logits_TE: Floats | None, _weights_TK: Floats | None
    ) -> None:
        wanted = np.unique(experts_TK)
        self._demand(layer, wanted[wanted < self.store.num_experts].tolist())
        self.driver.routed(layer, experts_TK, logits_TE)

    def end_step(self) -> None:
        self._let_go()
        self.driver.end_step()
        self.stats.end_step()

    # ---- experts for the model

    def _demand(self, layer: int, wanted: list[int]) -> list[int]:
        self._abandon_leftovers()
        with self._worker.condition:
            for e in wanted:
                self._worker.errors.pop((layer, e), None)
            order = self._prefetcher.routed(layer, wanted)
            self._ordered[layer] = order
            self._worker.condition.notify_all()
        return order

    def _abandon_leftovers(self) -> None:
        """What a layer asked for and never computed, because its forward pass ended in an
        exception or its block left an expert out, must not hold slots that the next one needs."""
        with self._worker.condition:
            for layer, order in self._ordered.items():
                self._prefetcher.abandon(layer, order)
            self._ordered.clear()

    def ready(self, layer: int, wanted: list[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The wanted experts, each when it is ready; the slot is held until the next is taken.

        Raises:
            TransferError: an expert's bytes did not arrive; the others are given back.
        """
        order = self._ordered.get(layer)
        if order is None or sorted(order) != wanted:
            # No router was seen, or the block changed what it chose: what arrives here is right.
            order = self._demand(layer, wanted)
        pending = list(order)
        try:
            while pending:
                expert, slot = self._wait(layer, pending)
                pending.remove(expert)
                try:
                    yield expert, self._arena.weights(layer, slot)
                finally:
                    with self._worker.condition:
                        self._prefetcher.used((layer, expert))
                        self._worker.condition.notify_all()
        finally:
            with self._worker.condition:
                self._ordered.pop(layer, None)
                if pending:
                    self._prefetcher.abandon(layer, pending)

    def hold(self, layer: int, expert: int) -> dict[str, Tensor]:
        """One expert's parameters, for experts modules that run their own loop; they stay valid
        until the next expert of the model is asked for.

        Raises:
            TransferError: the expert's bytes did not arrive.
        """
        if self._held == (layer, expert):
            entry = self._prefetcher.cache.get(self._held)
            assert entry is not None
            return self._arena.weights(layer, entry.slot)
        self._let_go()
        order = self._ordered.get(layer)
        if order is None or expert not in order:
            self._demand(layer, [expert])
            order = self._ordered[layer]
        _, slot = self._wait(layer, [expert])
        order.remove(expert)
        self._held = layer, expert
        return self._arena.weights(layer, slot)

    def _let_go(self) -> None:
        if self._held is not None:
            with self._worker.condition:
                self._prefetcher.used(self._held)
                self._worker.condition.notify_all()
            self._held = None

    def _wait(self, layer: int, pending: list[int]) -> tuple[int, int]:
        """The next expert to compute and its slot: the first that is ready, or strictly the first
        where the system does not reorder."""
        techniques = self._prefetcher.techniques
        with self._worker.condition:
            candidates = pending if techniques.reordered else pending[:1]
            self._prefetcher.demand((layer, pending[0]))
            if not techniques.early_preemption:
                candidates = pending[:1]
                self._worker.condition.notify_all()
            start = time.perf_counter()
            while True:
                for e in candidates:
                    entry = self._prefetcher.cache.get((layer, e))
                    if entry is not None and self._prefetcher.is_ready((layer, e)):
                        self.stats.stall_seconds += time.perf_counter() - start
                        return e, entry.slot
                for e in candidates:
                    if (error := self._worker.errors.get((layer, e))) is not None:
                        raise error
                if not self._worker.is_alive:
                    raise TransferError("the transfer worker has died; load the model again")
                self._worker.condition.wait(WORKER_CHECK_SECONDS)

    def close(self) -> None:
        """Ends the worker and closes the files."""
        self._worker.close()
        self.store.close()

    # ---- what a run can be asked

    @property
    def arena_bytes(self) -> int:
        """All the memory that experts take."""
        return self._arena.num_bytes + self.store.scratch_bytes

    def report(self) -> dict[str, Any]:
        """Counters of the policy core, times and memory."""
        with self._worker.condition:
            counters = self._prefetcher.total()
            pending = sum(
                entry.speculative_bytes for entry in self._prefetcher.cache.entries.values()
            )
        return {
            **counters.as_dict(),
            "bytes_prefetched_unused_yet": pending,
            "hit_rate": counters.hit_rate,
            "fetch_rate": counters.fetch_rate,
            "joint_rate": counters.joint_rate,
            "predictor_seconds": self.driver.seconds,
            "arena_bytes": self.arena_bytes,
            "arena_slots": self._prefetcher.cache.num_slots,
            **self.stats.as_dict(),
        }
