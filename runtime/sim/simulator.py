"""Discrete-event simulation of one device: its cache, links, compute stream and predictor."""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence

from predictors.base import Floats, Forecasts, Ints
from runtime.policy.device_cache import DeviceCache
from runtime.policy.eviction.protocol import Expert
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.policy.host_split import choose_host_experts
from runtime.policy.tier import TransferTask
from runtime.sim.hardware import Hardware, RooflineHardware

Observer = Callable[[str, float, float, Expert | None], None]
"""Called with what happened (compute, stall, fetch, prefetch), its start, its end and the expert;
None: all of a layer but its experts."""

NOTHING_ON_HOST: tuple[frozenset[int], float] = (frozenset(), 0.0)
"""The experts that the host's processor computes, and the time that it takes."""


class Simulator:
    """Advances the links and the predictor with the clock of the compute stream."""

    def __init__(
        self,
        cache: DeviceCache,
        hardware: Hardware,
        *,
        scheduler: ForecastScheduler,
        observer: Observer | None = None,
        is_stateless: bool = False,
        hybrid: RooflineHardware | None = None,
    ):
        """Makes a simulator at time 0.

        Args:
            cache: Cache of the device, whose transfers are simulated.
            hardware: Times of the machine.
            scheduler: Gets the forecasts.
            observer: Called with what happens.
            is_stateless: The predictor may leave out an event whose forecasts would be late.
            hybrid: The hardware, if it may compute missed experts in host memory.
        """
        self.now = 0.0
        """Clock of the compute stream, in seconds."""
        self.stall_seconds = 0.0
        """Time that the computation waited for experts and loads."""
        self.predictor_seconds = 0.0
        """Time of predictions."""
        self._observer = observer
        self._cache = cache
        self._overheads = hardware.overheads
        self._task_seconds = self._overheads.task_seconds
        self._compute_speed_transferring = self._overheads.compute_speed_transferring
        self._is_synchronous = self._overheads.predictor_inline or cache.system.synchronous
        self._is_stateless = is_stateless
        self._hybrid = hybrid
        self._scheduler = scheduler
        self._tiers = cache.tiers
        self._arrived: list[Expert] = []
        """Experts of which something has arrived in the computing tier since the last wait."""
        self._links = [
            LinkTransfers(
                speed_together=self._overheads.transfer_speed_together,
                speed_computing=self._overheads.transfer_speed_computing,
            )
            for _ in self._tiers
        ]
        """Transfers of each tier's link."""
        self._bottom = self._links[-1]
        self._is_slowed_by_computing = self._overheads.transfer_speed_computing != 1.0
        self._hardware = hardware
        self._transfer_times: list[dict[int, float]] = [{} for _ in self._tiers]
        """Time of a transfer into each tier, by its bytes."""
        self._expert_times: dict[int, float] = {}
        """Time of an expert by its number of tokens."""
        self._predictions: deque[_Prediction] = deque()
        """Predictions that are not complete, in the order of their events; the first one runs."""
        self._prediction_end = math.inf
        """Time when the first prediction is complete."""
        self._load: TransferTask | None = None
        """The transfer of other bytes than experts."""

    def begin_step(self) -> None:
        """Starts a forward pass and computes what is outside of its layers.

        Forecasts for the last pass are late. A predictor with a state completes its events first.
        """
        self._drop_late(None)
        while self._predictions and not self._is_stateless:
            self._start_transfers()
            self._handle(self._next_event_time())
        if self._overheads.step_seconds:
            self.compute(self._overheads.step_seconds)

    # ---- the predictor

    def forecast(self, forecasts: Forecasts, layer_now: int, seconds: float) -> None:
        """Schedules the predictor's answer to an event for the time when it has been computed.

        It takes `seconds` after the answers to earlier events; a synchronous system computes
        nothing else meanwhile.
        """
        if not forecasts or not self._scheduler.prefetching:
            return
        if self._is_synchronous:
            self.predictor_seconds += seconds
            self.compute(seconds)
            self._scheduler.schedule(forecasts, layer_now)
            self._start_transfers()  # the transfer thread starts before the router runs
            return
        self._predictions.append(_Prediction(seconds, forecasts, layer_now))
        if len(self._predictions) == 1:
            self._start_prediction()

    def _start_prediction(self) -> None:
        prediction = self._predictions[0]
        seconds = prediction.seconds
        self.predictor_seconds += seconds
        self._prediction_end = self.now + seconds

    def _drop_late(self, layer: int | None) -> None:
        """Drops forecasts up to a layer that is now routed, or all of them.

        Without forecasts left, an event that waits is dropped if the predictor has no state.
        """
        if not self._predictions:
            return
        kept: deque[_Prediction] = deque()
        for prediction in self._predictions:
            prediction.forecasts = [
                forecast
                for forecast in prediction.forecasts
                if layer is not None and forecast.layer > layer
            ]
            if prediction.forecasts or not kept or not self._is_stateless:
                kept.append(prediction)
        self._predictions = kept

    # ---- other bytes than experts

    def start_load(self, num_bytes: int) -> None:
        """Starts a transfer to the device, such as of KV caches, in parallel with experts'.

        Both have `Overheads.transfer_speed_together` of the link's speed.
        """
        assert self._load is None, "one load at a time"
        self._load = TransferTask((-1, -1), -1, 0, 0, num_bytes, True, None)
        self._links[0].start(self._load, self.now, self._transfer_seconds(0, num_bytes), False)

    def finish_load(self) -> None:
        """Waits for the end of the last load."""
        started = self.now
        while self._load is not None:
            self._wait()
        self.stall_seconds += self.now - started

    # ---- the compute stream

    def compute(self, seconds: float, expert: Expert | None = None) -> None:
        """Computes for a while: one expert, or a layer's other weights."""
        started, left = self.now, seconds
        bottom, speed = self._bottom, 1.0
        if self._is_slowed_by_computing:
            bottom.set_computing(started, True)
        while True:
            self._start_transfers()
            if bottom.is_worker_busy:
                speed = self._compute_speed_transferring
            end = self.now + left / speed
            event = self._next_event_time()
            if event > end:
                break
            left = max(0.0, left - (event - self.now) * speed)
            self._handle(event)
            speed = 1.0
        self.now = end
        if self._observer is not None:
            self._observer("compute", started, end, expert)

    def on_tokens_routed(self, layer: int, experts_TK: Ints) -> None:
        self._cache.on_tokens_routed(layer, experts_TK)

    def on_reuse_scores(self, layer: int, score_1E: Floats) -> None:
        self._cache.on_reuse_scores(layer, score_1E)

    def run_experts(
        self, layer: int, tokens_per_expert: dict[int, int], computed_after: float = 0.0
    ) -> None:
        """Requests, waits for and computes the experts that the layer's router has chosen.

        `computed_after`: seconds until the tokens arrive from other devices.
        """
        cache = self._cache
        self._drop_late(layer)
        on_host, host_seconds = NOTHING_ON_HOST
        if self._hybrid is not None:
            on_host, host_seconds = self._split(layer, tokens_per_expert)
        pending = cache.request_routed(layer, tokens_per_expert, on_host)
        host_end = self.now + host_seconds
        if computed_after:
            self.compute(computed_after)
        while pending:
            e = self._next_ready(layer, pending)
            pending.remove(e)
            expert = layer, e
            self.compute(self._expert_seconds(tokens_per_expert[e]), expert)
            cache.release(expert)
        if on_host:
            self._wait_until(host_end)
            cache.release_below(layer, on_host)

    def _split(self, layer: int, tokens_per_expert: dict[int, int]) -> tuple[frozenset[int], float]:
        """Returns the experts that the host's processor computes, and the time that it takes."""
        assert self._hybrid is not None
        missed = self._cache.missed_in_host_memory(layer, tokens_per_expert)
        if not missed:
            return NOTHING_ON_HOST
        tokens = {e: tokens_per_expert[e] for e in missed}
        costs = self._hybrid.split_costs(math.ceil(sum(tokens.values()) / len(tokens)))
        on_host, _ = choose_host_experts(tokens, costs)
        return on_host, costs.host_side([tokens[e] for e in on_host])

    def _wait_until(self, end: float) -> None:
        """Waits for the host's processor while transfers go on."""
        started = self.now
        while True:
            self._start_transfers()
            event = self._next_event_time()
            if event > end:
                break
            self._handle(event)
        self.now = max(self.now, end)
        self.stall_seconds += self.now - started

    def request_early(self, layer: int, tokens_per_expert: dict[int, int]) -> None:
        """Requests the experts of a micro-batch before those of the others are known."""
        self._cache.request_early(layer, tokens_per_expert)

    def run_experts_by_batch(self, layer: int, batches: Sequence[dict[int, int]]) -> None:
        """Requests what the whole group needs and computes it micro-batch by micro-batch.

        An expert is released when the last micro-batch that needs it has computed it.
        """
        self._drop_late(layer)
        tokens_per_expert: Counter[int] = Counter()
        for batch in batches:
            tokens_per_expert.update(batch)
        self._cache.request_routed(layer, tokens_per_expert)
        uses = deque(use for batch in batches for use in sorted(batch.items()))
        while uses:
            e, num_tokens = uses[0]
            self._cache.make_room(layer, e, list(dict.fromkeys(e for e, _ in uses)))
            self._wait_for_any(layer, [e])
            self.compute(self._expert_seconds(num_tokens), (layer, e))
            uses.popleft()
            if all(e != later for later, _ in uses):
                self._cache.release((layer, e))

    def _next_ready(self, layer: int, pending: Sequence[int]) -> int:
        system = self._cache.system
        candidates = pending
        if not system.early_preemption:
            candidates = pending[:1]
            self._cache.request((layer, pending[0]))
        elif not system.reordered:
            candidates = pending[:1]
            self._cache.make_room(layer, pending[0], pending)
        return self._wait_for_any(layer, candidates)

    def _wait_for_any(self, layer: int, candidates: Sequence[int]) -> int:
        """Waits until an expert is ready; returns the first one that is."""
        top = self._cache.top
        ready = top.first_ready(layer, candidates)
        if ready is not None:
            return ready
        started, arrived = self.now, self._arrived
        while ready is None:
            arrived.clear()
            self._wait()
            # Only what has just arrived can have become ready.
            for at, e in arrived:
                if at == layer and e in candidates:
                    ready = top.first_ready(layer, candidates)
                    break
        self.stall_seconds += self.now - started
        if self._observer is not None and self.now > started:
            self._observer("stall", started, self.now, (layer, ready))
        return ready

    def _wait(self) -> bool:
        """Waits for the next event; returns whether a transfer has ended.

        A computation that reads by itself does one requested transfer, if there is one.
        """
        bottom = self._bottom
        if self._is_slowed_by_computing:
            bottom.set_computing(self.now, False)
        if self._overheads.computation_reads and bottom.num < 2:
            task = self._tiers[-1].next_task(high_only=True)
            if task is not None:
                self._start(len(self._tiers) - 1, task, False)
                while task in bottom:
                    self._start_transfers()
                    self._handle(self._next_event_time())
                return True
        self._start_transfers()
        event = self._next_event_time()
        assert event < math.inf, "the computation waits and nothing is under way"
        return self._handle(event)

    # ---- time

    def _next_event_time(self) -> float:
        event = self._prediction_end
        for link in self._links:
            if link.first_end < event:
                event = link.first_end
        return event

    def _handle(self, event: float) -> bool:
        """Moves the clock to the event and handles it; returns whether a transfer has ended."""
        if event > self.now:
            self.now = event
        for i, link in enumerate(self._links):
            if link.first_end <= event:
                self._finish(i, link.finish_first())
                return True
        prediction = self._predictions.popleft()
        self._prediction_end = math.inf
        if self._predictions:
            self._start_prediction()
        self._scheduler.schedule(prediction.forecasts, prediction.layer_now)
        return False

    def _start_transfers(self) -> None:
        # From the top down: what a tier requests of the one below can start at once.
        for i, tier in enumerate(self._tiers):
            link = self._links[i]
            if not link.is_worker_busy and tier.may_start():
                task = tier.next_task()
                if task is not None:
                    self._start(i, task, True)

    def _start(self, i: int, task: TransferTask, by_worker: bool) -> None:
        seconds = self._transfer_seconds(i, task.num_bytes) + self._task_seconds
        link = self._links[i]
        link.start(task, self.now, seconds, by_worker)

    def _transfer_seconds(self, i: int, num_bytes: int) -> float:
        times = self._transfer_times[i]
        seconds = times.get(num_bytes)
        if seconds is None:
            seconds = times[num_bytes] = self._hardware.transfer_seconds(num_bytes, tier=i)
        return seconds

    def _expert_seconds(self, num_tokens: int) -> float:
        seconds = self._expert_times.get(num_tokens)
        if seconds is None:
            seconds = self._expert_times[num_tokens] = self._hardware.expert_seconds(num_tokens)
        return seconds

    def _finish(self, i: int, transfer: "_RunningTransfer") -> None:
        task, started = transfer.task, transfer.started
        if task is self._load:
            self._load = None
            return
        tier = self._tiers[i]
        tier.complete(task)
        if i:
            return
        self._arrived.append(task.expert)
        if self._observer is not None:
            kind = "fetch" if task.high else "prefetch"
            self._observer(kind, started, self.now, task.expert)


class _Prediction:
    """The predictor's work on one event."""

    __slots__ = ("forecasts", "layer_now", "seconds")

    def __init__(self, seconds: float, forecasts: Forecasts, layer_now: int) -> None:
        self.seconds = seconds
        self.forecasts = forecasts
        """Those that are not late."""
        self.layer_now = layer_now


class _RunningTransfer:
    """A transfer and when it ends."""

    __slots__ = ("by_worker", "end", "started", "task")

    def __init__(self, end: float, task: TransferTask, started: float, by_worker: bool) -> None:
        self.end = end
        """Time of its end at its present speed."""
        self.task = task
        self.started = started
        self.by_worker = by_worker
        """Done by the link's thread, not by the computation."""


class LinkTransfers:
    """At most two transfers at a time.

    Args:
        speed_together: Speed of each of two simultaneous transfers, against one alone.
        speed_computing: Speed of a transfer while the computation computes.
    """

    def __init__(self, *, speed_together: float = 1.0, speed_computing: float = 1.0):
        self._together = speed_together
        self._computing = speed_computing
        self._is_computing = False
        self._running: list[_RunningTransfer] = []
        self.first_end = math.inf
        """Time when the first transfer ends, if nothing else happens."""
        self.is_worker_busy = False
        """Whether the link's thread runs a transfer."""

    @property
    def num(self) -> int:
        return len(self._running)

    def __contains__(self, task: TransferTask) -> bool:
        return any(running.task is task for running in self._running)

    def set_computing(self, now: float, is_computing: bool) -> None:
        """Sets whether the computation computes from now on."""
        if is_computing == self._is_computing:
            return
        self._is_computing = is_computing
        if self._running and self._computing != 1.0:
            self._stretch(now, 1 / self._computing if is_computing else self._computing)

    def start(self, task: TransferTask, now: float, seconds: float, by_worker: bool) -> None:
        """Starts a transfer that takes `seconds` when nothing else runs."""
        if by_worker:
            self.is_worker_busy = True
        if self._is_computing:
            seconds /= self._computing
        if self._running:
            self._stretch(now, 1 / self._together)
            seconds /= self._together
        self._running.append(_RunningTransfer(now + seconds, task, now, by_worker))
        self.first_end = min(self.first_end, now + seconds)

    def finish_first(self) -> _RunningTransfer:
        """Removes the transfer that ends first and returns it."""
        if len(self._running) == 1:
            first = self._running.pop()
            self.first_end = math.inf
        else:
            first, other = self._running
            if other.end < first.end:
                first, other = other, first
            self._running = [other]
        if first.by_worker:
            self.is_worker_busy = False
        if self._running:
            self._stretch(first.end, self._together)
        return first

    def _stretch(self, now: float, factor: float) -> None:
        """Multiplies the remaining time of each transfer by `factor`."""
        self.first_end = math.inf
        for running in self._running:
            if factor != 1.0:
                running.end = now + (running.end - now) * factor
            self.first_end = min(self.first_end, running.end)
