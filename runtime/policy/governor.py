"""Whether to fetch on forecasts at all, from the times of decode steps; the clock is the caller's.

Prefetching moves bytes over the link that misses need too, and predicting takes time that the model
may want. Where a fetch costs less than that, prefetching loses.

How many bytes to fetch is not decided here: bounding them by bandwidth x time to the target layer
was tried and lost 5 to 12 % (benchmarks/README.md, moecast), because what arrives in part is a join
and not a miss, and what is left when the layer is routed is dropped anyway.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

log = logging.getLogger(__name__)

TURN_STEPS = 2
"""Decode steps in a row with the other setting while both are compared."""
PERIOD = 8
"""Steps from one turn of the other setting to its next: short, so that a request's first tokens,
which miss more, fall on both alike, and mostly of the present one, which is likely the faster."""
TURNS = 4
"""Turns of a comparison."""
PROBE_STEPS = TURNS * PERIOD
REMEMBERED = 4
"""Comparisons whose times count: what four turns do not show, sixteen may."""
WARM_UP = 16
"""Decode steps before the first comparison: an arena that fills says nothing about either."""
FIRST_STRETCH = 256
"""Decode steps before the next comparison; doubles while the choice stays."""
LONGEST_STRETCH = 4096
MARGIN = 0.02
"""Share by which the other setting's median must be smaller to be worth a change."""
SURE = 2.5
"""Standard deviations by which times without prefetching must rank before those with it (Mann and
Whitney's test). A token's time varies by a third with what it happens to miss: medians alone
turned off at 50 % what saved a quarter. To turn on again needs the smaller median only."""


@dataclass
class Switch:
    """Chooses between prefetching and not, again and again.

    For some steps the other setting takes turns with the present one; it is chosen for a stretch if
    it is faster, and prefetching is left only if that is sure.
    """

    prefetching: bool = True
    num_switches: int = 0
    said: Callable[[str], None] = field(default=log.info, repr=False)
    """Told each time prefetching is turned off or on for good."""
    turned: Callable[[bool], None] = field(default=lambda _: None, repr=False)
    """Told of every step's setting that differs from the step before."""
    _chosen: bool = True
    _stretch: int = FIRST_STRETCH // 2
    _left: int = WARM_UP
    """Steps of the stretch."""
    _probe: int | None = None
    """Steps of the comparison that are over; None: none is under way."""
    _times: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})

    def step_ended(self, seconds: float) -> None:
        """A decode step took so long with the present setting."""
        if self._probe is None:
            self._left -= 1
            if self._left <= 0:
                self._probe = 0
        else:
            # The first step after a change still has what the other setting fetched.
            if self._probe % PERIOD not in (0, TURN_STEPS):
                self._times[self.prefetching].append(seconds)
            self._probe += 1
        if self._probe == PROBE_STEPS:
            self._choose()
            self._probe = None
        is_turn = self._probe is not None and self._probe % PERIOD < TURN_STEPS
        self._set(self._chosen ^ is_turn)

    def _set(self, prefetching: bool) -> None:
        if prefetching != self.prefetching:
            self.prefetching = prefetching
            self.turned(prefetching)

    def _choose(self) -> None:
        with_it, without = (median(self._times[setting]) for setting in (True, False))
        if self._chosen:
            change = without < with_it * (1 - MARGIN) and self._rank_without() > SURE
        else:
            change = with_it < without * (1 - MARGIN)
        if change:
            self._chosen = not self._chosen
            self._stretch = FIRST_STRETCH
            self.num_switches += 1
            self.said(
                f"prefetching turned {'on' if self._chosen else 'off'}: a token takes "
                f"{1e3 * with_it:.2f} ms with it, {1e3 * without:.2f} ms without"
            )
        else:
            self._stretch = min(LONGEST_STRETCH, 2 * self._stretch)
        for setting, times in self._times.items():
            turn = PERIOD - TURN_STEPS if setting is self._chosen else TURN_STEPS
            kept = 0 if change else (REMEMBERED - 1) * TURNS * (turn - 1)
            del times[: len(times) - min(kept, len(times))]
        self._left = self._stretch

    def _rank_without(self) -> float:
        """How much sooner times without prefetching rank than those with it, in standard deviations
        of two settings that are alike.
        """
        one, other = self._times[False], self._times[True]
        sooner = sum((a < b) + 0.5 * (a == b) for a in one for b in other)
        num_pairs = len(one) * len(other)
        deviation = (num_pairs * (len(one) + len(other) + 1) / 12) ** 0.5
        return (sooner - num_pairs / 2) / deviation


class Governor:
    """What `moecast` systems decide from their own measurements."""

    def __init__(self) -> None:
        self.switch = Switch()

    @property
    def prefetching(self) -> bool:
        """Whether forecasts are wanted in this step."""
        return self.switch.prefetching

    def as_dict(self) -> dict[str, object]:
        """What it has decided, for the statistics."""
        return {"prefetching": self.switch.prefetching, "switches": self.switch.num_switches}
