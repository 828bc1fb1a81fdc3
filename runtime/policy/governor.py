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
"""Decode steps in a row with one setting while both are compared. The first of them is not counted:
what the other setting fetched is still there."""
TURNS = 6
"""Turns of each setting before one is chosen. They alternate, so that a request's first tokens,
which miss more, fall on both alike."""
PROBE_STEPS = 2 * TURNS * TURN_STEPS
WARM_UP = 16
"""Decode steps before the first comparison: an arena that fills says nothing about either."""
FIRST_STRETCH = 256
"""Decode steps before the next comparison; doubles while the choice stays."""
LONGEST_STRETCH = 4096
MARGIN = 0.02
"""Share by which the other setting must be faster: below it, times only jitter."""


@dataclass
class Switch:
    """Chooses between prefetching and not, again and again.

    Both settings take turns for some steps; the one with the smaller median stays for a stretch.
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
            if self._probe % TURN_STEPS:
                self._times[self.prefetching].append(seconds)
            self._probe += 1
        if self._probe == PROBE_STEPS:
            self._choose()
            self._probe = None
        if self._probe is None:
            self._set(self._chosen)
        else:
            self._set(self._chosen ^ bool(self._probe // TURN_STEPS % 2 == 0))

    def _set(self, prefetching: bool) -> None:
        if prefetching != self.prefetching:
            self.prefetching = prefetching
            self.turned(prefetching)

    def _choose(self) -> None:
        with_it, without = (median(self._times[setting]) for setting in (True, False))
        current, other = (with_it, without) if self._chosen else (without, with_it)
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
        for times in self._times.values():
            times.clear()
        self._left = self._stretch


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
