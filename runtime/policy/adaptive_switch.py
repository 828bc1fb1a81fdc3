"""Decides whether to do something that may not pay, from the times of decode steps.

First of all whether to prefetch. Prefetching moves bytes over the link that misses need too, and
predicting takes compute time. Where misses cost less than that, prefetching loses.

How many bytes to prefetch is not decided here: bounding them by bandwidth x time to the target
layer was tried and lost 5 to 12 % (benchmarks/README.md, moecast), because an expert that has
arrived in part is a join and not a miss, and the rest is dropped when the layer is routed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

log = logging.getLogger(__name__)

TURN_STEPS = 2
"""Consecutive decode steps with the other setting during a comparison."""
PERIOD = 8
"""Steps from one turn of the other setting to the next: short, so that a request's first tokens,
which miss more, affect both settings alike, and mostly spent in the present, likely faster one."""
TURNS = 4
"""Turns of a comparison."""
PROBE_STEPS = TURNS * PERIOD
REMEMBERED = 4
"""Recent comparisons that are taken into account."""
WARM_UP = 16
"""Decode steps before the first comparison, while the cache fills."""
FIRST_STRETCH = 256
"""Decode steps before the next comparison; doubles while the choice stays."""
LONGEST_STRETCH = 4096
MARGIN = 0.02
"""Share by which the other setting's median must be smaller to be worth a change."""
SURE = 2.5
"""Standard deviations by which times without prefetching must rank before those with it to turn
it off (Mann and Whitney's test). A token's time varies by a third with its misses: medians alone
turned prefetching off at a budget of 50 %, where it saved a quarter. Turning it on again needs
only the smaller median."""


@dataclass
class AdaptiveSwitch:
    """Turns prefetching, or `what` it is named for, on or off by the times of decode steps.

    Now and then the other setting takes turns with the present one for some steps. The faster one
    is kept until the next comparison; it is turned off only if the loss is significant.
    """

    what: str = "prefetching"
    """Name in messages."""
    is_on: bool = True
    """The setting of this step."""
    num_switches: int = 0
    report: Callable[[str], None] = field(default=log.info, repr=False)
    """Called with a message when a comparison changes the setting."""
    on_change: Callable[[bool], None] = field(default=lambda _: None, repr=False)
    """Called with the new setting whenever a step's setting differs from the previous step's."""
    _chosen: bool = True
    _stretch: int = FIRST_STRETCH // 2
    _steps_left: int = WARM_UP
    """Steps until the next comparison."""
    _probe: int | None = None
    """Steps of the running comparison that are over; None: no comparison is running."""
    _times: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})

    def record_step(self, seconds: float) -> None:
        """Records the time of a decode step and decides on the setting of the next one."""
        if self._probe is None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self._probe = 0
        else:
            # The first step after a change still has what the other setting fetched.
            if self._probe % PERIOD not in (0, TURN_STEPS):
                self._times[self.is_on].append(seconds)
            self._probe += 1
        if self._probe == PROBE_STEPS:
            self._choose()
            self._probe = None
        is_turn = self._probe is not None and self._probe % PERIOD < TURN_STEPS
        is_on = self._chosen ^ is_turn
        if is_on != self.is_on:
            self.is_on = is_on
            self.on_change(is_on)

    def turn_off(self, reason: str) -> None:
        """Turns it off until a comparison finds it faster."""
        self._chosen, self._probe = False, None
        self._steps_left = self._stretch = FIRST_STRETCH
        for times in self._times.values():
            times.clear()
        self.num_switches += 1
        self.report(f"{self.what} turned off: {reason}")
        if self.is_on:
            self.is_on = False
            self.on_change(False)

    def _choose(self) -> None:
        """Ends a comparison: changes the setting or waits twice as long for the next one."""
        on_seconds, off_seconds = (median(self._times[setting]) for setting in (True, False))
        if self._chosen:
            change = off_seconds < on_seconds * (1 - MARGIN) and self._rank_without() > SURE
        else:
            change = on_seconds < off_seconds * (1 - MARGIN)
        if change:
            self._chosen = not self._chosen
            self._stretch = FIRST_STRETCH
            self.num_switches += 1
            self.report(
                f"{self.what} turned {'on' if self._chosen else 'off'}: time per output token is "
                f"{1e3 * on_seconds:.2f} ms with it, {1e3 * off_seconds:.2f} ms without"
            )
        else:
            self._stretch = min(LONGEST_STRETCH, 2 * self._stretch)
        for setting, times in self._times.items():
            turn = PERIOD - TURN_STEPS if setting is self._chosen else TURN_STEPS
            kept = 0 if change else (REMEMBERED - 1) * TURNS * (turn - 1)
            del times[: len(times) - min(kept, len(times))]
        self._steps_left = self._stretch

    def _rank_without(self) -> float:
        """Returns how much lower times without prefetching rank than times with it.

        The unit is the standard deviation of the rank sum of two equal distributions (Mann and
        Whitney's test).
        """
        off_times, on_times = self._times[False], self._times[True]
        sooner = sum((a < b) + 0.5 * (a == b) for a in off_times for b in on_times)
        num_pairs = len(off_times) * len(on_times)
        deviation = (num_pairs * (len(off_times) + len(on_times) + 1) / 12) ** 0.5
        return (sooner - num_pairs / 2) / deviation
