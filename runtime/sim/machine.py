"""The clock of a simulated machine, and what takes time on it: links and a predictor."""

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence

from predictors.base import Forecasts
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.policy.tier import TransferTask
from runtime.transfer.loop import TierLink, TimelineSink, TransferLoop
from runtime.transfer.ring import ARRIVED, Ring

LOAD = -1
"""Ticket of a transfer of other bytes than experts."""


class SimulatedClock:
    """The time of a simulated machine, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0


class _RunningTransfer:
    """A transfer and when it ends."""

    __slots__ = ("end", "started", "ticket")

    def __init__(self, ticket: int, started: float, end: float) -> None:
        self.ticket = ticket
        self.started = started
        self.end = end
        """Time of its end at its present speed."""


class SimulatedRing(Ring):
    """A link on which a transfer takes a known time, at most `num_readers` experts' at once.

    Args:
        seconds: Returns the time of a number of bytes when nothing else runs.
        num_readers: What transfers experts; a load is transferred in addition.
        speed_together: Speed of each of two simultaneous transfers, against one alone.
        speed_computing: Speed of a transfer while the computation computes.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        seconds: Callable[[int], float],
        *,
        num_readers: int = 1,
        speed_together: float = 1.0,
        speed_computing: float = 1.0,
    ):
        self.errors = {}
        self._clock = clock
        self._seconds = functools.cache(seconds)
        self._num_readers = num_readers
        self._together = speed_together
        self._computing = speed_computing
        self._is_computing = False
        self._running: list[_RunningTransfer] = []
        self.num_experts = 0
        """Transfers of experts that run."""
        self.first_end = math.inf
        """Time when the first transfer ends, if nothing else happens."""

    def has_room(self) -> bool:
        return self.num_experts < self._num_readers

    def cancel(self, ticket: int) -> bool:  # noqa: ARG002
        """Returns False: a transfer begins when it is submitted."""
        return False

    def is_loading(self) -> bool:
        return any(transfer.ticket == LOAD for transfer in self._running)

    def set_computing(self, is_computing: bool) -> None:
        """Sets whether the computation computes from now on."""
        if is_computing == self._is_computing:
            return
        self._is_computing = is_computing
        if self._running and self._computing != 1.0:
            factor = 1 / self._computing if is_computing else self._computing
            self._stretch(self._clock.now, factor)

    def submit(self, ticket: int, task: TransferTask) -> None:
        self.num_experts += 1
        self._start(ticket, self._seconds(task.num_bytes))

    def load(self, seconds: float) -> None:
        """Starts the transfer of other bytes than experts."""
        self._start(LOAD, seconds)

    def _start(self, ticket: int, seconds: float) -> None:
        now = self._clock.now
        if self._is_computing:
            seconds /= self._computing
        if self._running:
            self._stretch(now, 1 / self._together)
            for _ in self._running:
                seconds /= self._together
        self._running.append(_RunningTransfer(ticket, now, now + seconds))
        self.first_end = min(self.first_end, now + seconds)

    def finish_first(self) -> _RunningTransfer:
        """Removes the transfer that ends first and returns it."""
        first = self._running[0]
        for transfer in self._running:
            if transfer.end < first.end:
                first = transfer
        self._running.remove(first)
        self.num_experts -= first.ticket != LOAD
        self.first_end = math.inf
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


class _Prediction:
    """The predictor's work on one event."""

    __slots__ = ("forecasts", "layer_now", "seconds")

    def __init__(self, seconds: float, forecasts: Forecasts, layer_now: int) -> None:
        self.seconds = seconds
        self.forecasts = forecasts
        """Those that are not late."""
        self.layer_now = layer_now


class SimulatedPredictor:
    """Answers to events, one after another, each given to the scheduler when it is complete.

    Args:
        is_stateless: An event whose forecasts would be late may be left out.
    """

    def __init__(
        self, clock: SimulatedClock, scheduler: ForecastScheduler, *, is_stateless: bool = False
    ):
        self._clock = clock
        self._scheduler = scheduler
        self._is_stateless = is_stateless
        self.busy_seconds = 0.0
        """Time of predictions."""
        self._predictions: deque[_Prediction] = deque()
        """Those that are not complete, in the order of their events; the first one runs."""
        self.first_end = math.inf
        """Time when the first prediction is complete."""

    def predict(self, seconds: float, forecasts: Forecasts, layer_now: int) -> None:
        self._predictions.append(_Prediction(seconds, forecasts, layer_now))
        if len(self._predictions) == 1:
            self._start()

    def _start(self) -> None:
        seconds = self._predictions[0].seconds
        self.busy_seconds += seconds
        self.first_end = self._clock.now + seconds

    def finish_first(self) -> None:
        prediction = self._predictions.popleft()
        self.first_end = math.inf
        if self._predictions:
            self._start()
        self._scheduler.schedule(prediction.forecasts, prediction.layer_now)

    def must_finish(self) -> bool:
        """Returns whether events of the last step must be completed before the next one's."""
        return bool(self._predictions) and not self._is_stateless

    def drop_late(self, layer: int | None) -> None:
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


class SimulatedLoop(TransferLoop):
    """A transfer loop over simulated rings: waiting moves the clock to the next event.

    An event is the end of one transfer or of one prediction.
    """

    def __init__(
        self,
        links: Sequence[TierLink],
        rings: Sequence[SimulatedRing],
        clock: SimulatedClock,
        predictor: SimulatedPredictor,
        *,
        timeline: TimelineSink | None = None,
    ):
        super().__init__(links, timeline=timeline)
        self._clock = clock
        self._rings = tuple(rings)
        self._predictor = predictor

    def next_event(self) -> float:
        """Returns the time of the next event; infinity: there is none."""
        event = self._predictor.first_end
        for ring in self._rings:
            if ring.first_end < event:
                event = ring.first_end
        return event

    def wait(self) -> None:
        """Moves the clock to the next event, and books it."""
        event = self.next_event()
        assert event < math.inf, "the computation waits and nothing is under way"
        if event > self._clock.now:
            self._clock.now = event
        for ring in self._rings:
            if ring.first_end <= event:
                first = ring.finish_first()
                now = self._clock.now
                self._finish(first.ticket, ARRIVED, now - first.started, now)
                return
        self._predictor.finish_first()

    def _read_clock(self) -> float:
        return self._clock.now
