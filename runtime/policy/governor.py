"""How much to fetch on a forecast, and whether to fetch on forecasts at all, from measurements.

Prefetching moves bytes over the link that misses need too. What cannot arrive before its layer is
routed only delays them, and where a fetch costs less than predicting it, prefetching loses. Both
are measured here while serving; the clock is the caller's.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

log = logging.getLogger(__name__)

PROBE_STEPS = 16
"""Decode steps with each setting before one is chosen."""
SETTLE_STEPS = 4
"""Of these, not counted: the arena still holds what the other setting left."""
FIRST_STRETCH = 256
"""Decode steps before the losing setting is tried again; doubles while the choice stays."""
LONGEST_STRETCH = 4096
MARGIN = 0.02
"""Share by which the other setting must be faster: below it, times only jitter."""


class Window:
    """Bytes that the link can bring before a layer is routed: bandwidth x time to it."""

    SMOOTHING = 0.1

    def __init__(self) -> None:
        self._bytes_per_second: float | None = None
        self._layer_seconds: float | None = None

    def transferred(self, num_bytes: int, seconds: float) -> None:
        """The link was busy `seconds` with `num_bytes`."""
        if seconds > 0:
            self._bytes_per_second = self._smooth(self._bytes_per_second, num_bytes / seconds)

    def layer_passed(self, seconds: float) -> None:
        """From one layer's routing to the next one's, stalls included."""
        self._layer_seconds = self._smooth(self._layer_seconds, seconds)

    def _smooth(self, old: float | None, new: float) -> float:
        return new if old is None else old + self.SMOOTHING * (new - old)

    def num_bytes(self, distance: int) -> float:
        """What can arrive before the layer `distance` ahead is routed; infinite until measured."""
        if self._bytes_per_second is None or self._layer_seconds is None:
            return float("inf")
        return self._bytes_per_second * self._layer_seconds * max(1, distance)


@dataclass
class Switch:
    """Chooses between prefetching and not by the decode steps' own times, again and again.

    Each setting is probed for some steps; the one with the smaller median stays on for a stretch,
    then the other is probed again.
    """

    prefetching: bool = True
    num_switches: int = 0
    said: Callable[[str], None] = field(default=log.info, repr=False)
    """Told each time prefetching is turned off or on for good."""
    _chosen: bool = True
    _stretch: int = FIRST_STRETCH
    _left: int = PROBE_STEPS
    _times: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    _probing: bool = True

    def step_ended(self, seconds: float) -> None:
        """A decode step took so long with the present setting."""
        self._left -= 1
        settling = self._probing and self._left >= PROBE_STEPS - SETTLE_STEPS
        if not settling:
            times = self._times[self.prefetching]
            times.append(seconds)
            del times[:-PROBE_STEPS]
        if self._left > 0:
            return
        if not self._probing:
            self._start_probe(not self._chosen)
        elif not self._times[not self.prefetching]:
            self._start_probe(not self.prefetching)
        else:
            self._choose()

    def _start_probe(self, setting: bool) -> None:
        self._times[setting].clear()
        self.prefetching = setting
        self._probing = True
        self._left = PROBE_STEPS

    def _choose(self) -> None:
        with_it, without = (median(self._times[setting]) for setting in (True, False))
        other = without if self._chosen else with_it
        current = with_it if self._chosen else without
        if other < current * (1 - MARGIN):
            self._chosen = not self._chosen
            self._stretch = FIRST_STRETCH
            self.num_switches += 1
            self.said(
                f"prefetching turned {'on' if self._chosen else 'off'}: a token takes "
                f"{1e3 * with_it:.2f} ms with it, {1e3 * without:.2f} ms without"
            )
        else:
            self._stretch = min(LONGEST_STRETCH, 2 * self._stretch)
        self.prefetching = self._chosen
        self._probing = False
        self._left = self._stretch


class Governor:
    """The measured byte budget and the switch of `moecast` systems."""

    def __init__(self) -> None:
        self.window = Window()
        self.switch = Switch()

    @property
    def prefetching(self) -> bool:
        """Whether forecasts are wanted in this step."""
        return self.switch.prefetching

    def as_dict(self) -> dict[str, object]:
        """What it has decided, for the statistics."""
        return {"prefetching": self.switch.prefetching, "switches": self.switch.num_switches}
