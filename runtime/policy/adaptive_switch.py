"""Decides whether to do something that may not pay, from the times of decode steps.

In replays whether to prefetch: it moves bytes over the link that misses need too, and predicting
takes time, so that it loses where misses cost less. Served models measure both themselves
(`runtime.engine.forecast_payoff`) and switch hybrid computation by this rule.

How many bytes to prefetch is not decided here: bounding them by bandwidth x time to the target
layer was tried and lost 5 to 12 % (benchmarks/README.md, moecast), because an expert that has
arrived in part is a join and not a miss, and the rest is dropped when the layer is routed.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

log = logging.getLogger(__name__)

TURN_STEPS = 2
"""Consecutive decode steps with the other setting during a comparison."""
DOUBTFUL_TURN_STEPS = 4
"""The same while the present setting is in doubt."""
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
DOUBTFUL = 0.5
"""Standard deviations from which on a comparison is repeated at once: what loses a fifth is turned
off within some 150 tokens in place of 2,000, and what saves a tenth costs no more than before (by
times that vary by a third)."""
MOST_REPEATS = 8


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
    _turn_steps: int = TURN_STEPS
    _num_repeats: int = 0
    _comparisons: deque[dict[bool, list[float]]] = field(
        default_factory=lambda: deque(maxlen=REMEMBERED)
    )
    """Times of the steps of the latest comparisons, by setting."""

    def record_step(self, seconds: float) -> None:
        """Records the time of a decode step and decides on the setting of the next one."""
        if self._probe is None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self._probe = 0
                self._comparisons.append({True: [], False: []})
        else:
            # The first step after a change still has what the other setting fetched.
            if self._probe % PERIOD not in (0, self._turn_steps):
                self._comparisons[-1][self.is_on].append(seconds)
            self._probe += 1
        if self._probe == PROBE_STEPS:
            self._choose()
            self._probe = None
        is_turn = self._probe is not None and self._probe % PERIOD < self._turn_steps
        is_on = self._chosen ^ is_turn
        if is_on != self.is_on:
            self.is_on = is_on
            self.on_change(is_on)

    def _choose(self) -> None:
        """Ends a comparison: changes the setting, repeats it, or waits twice as long as before."""
        off_times, on_times = (
            [seconds for times in self._comparisons for seconds in times[setting]]
            for setting in (False, True)
        )
        off_seconds, on_seconds = median(off_times), median(on_times)
        if self._chosen:
            is_slower = off_seconds < on_seconds * (1 - MARGIN)
            rank = rank_sooner(off_times, on_times) if is_slower else 0.0
            change, is_doubtful = rank > SURE, rank > DOUBTFUL
        else:
            change, is_doubtful = on_seconds < off_seconds * (1 - MARGIN), False
        if change:
            self._chosen = not self._chosen
            self._stretch = FIRST_STRETCH
            self.num_switches += 1
            self._comparisons.clear()
            self.report(
                f"{self.what} turned {'on' if self._chosen else 'off'}: time per output token is "
                f"{1e3 * on_seconds:.2f} ms with it, {1e3 * off_seconds:.2f} ms without"
            )
        elif is_doubtful and self._num_repeats < MOST_REPEATS:
            self._num_repeats += 1
            self._turn_steps = DOUBTFUL_TURN_STEPS
            self._steps_left = 1
            return
        else:
            self._stretch = min(LONGEST_STRETCH, 2 * self._stretch)
        self._end_doubt()
        self._steps_left = self._stretch

    def _end_doubt(self) -> None:
        self._num_repeats, self._turn_steps = 0, TURN_STEPS


def rank_sooner(times: Sequence[float], others: Sequence[float]) -> float:
    """Returns how much lower the times rank than the others.

    The unit is the standard deviation of the rank sum of two equal distributions (Mann and
    Whitney's test).
    """
    sooner = sum((a < b) + 0.5 * (a == b) for a in times for b in others)
    num_pairs = len(times) * len(others)
    deviation = (num_pairs * (len(times) + len(others) + 1) / 12) ** 0.5
    return (sooner - num_pairs / 2) / deviation
