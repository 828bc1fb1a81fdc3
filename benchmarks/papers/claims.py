"""Numbers that the papers publish, next to the replays' figures."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.papers.cells import ReplayTable
from benchmarks.papers.published import find_published

Interval = tuple[float | None, float | None]
"""Least and largest value of a 95 % confidence interval; None: not measured."""

Ours = Any
"""A number, `[B]` numbers of bootstrap samples, or words."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """The same figure after the cause of a difference was changed, in part or in whole."""

    what: str
    """Description of the change."""
    ours: float | str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row of the comparison with the papers."""

    paper: str
    name: str = ""
    """Name in `published.yaml`."""
    where: str
    """Figure or table, and the section of the text that gives the number."""
    what: str
    paper_value: float | str
    ours: float | str | None
    low: float | None = None
    """Least and largest value of the 95 % confidence interval over requests; None: not measured."""
    high: float | None = None
    basis: str = ""
    """Models and routing that `ours` is from."""
    change: Change | None = None
    """Test of the reason for a difference; None: the reason is not known."""
    reason: str = ""
    """Why the two differ, where no replay can test it."""


@dataclass(frozen=True)
class Comparison:
    """A published figure as the replays have it."""

    name: str
    """Name in `published.yaml`."""
    ours: Ours
    basis: str = ""
    """Models and routing that it is from."""
    change: str = ""
    """Change that tests the reason for a difference."""
    changed: Ours = None
    """The figure after the change."""
    reason: str = ""
    """Why the figures differ, where no replay can test it."""


Figures = Iterable[Callable[[ReplayTable], Iterable[Comparison]]]
"""Each computes a figure of a paper from replays. It is called three times: to list them, with
their figures, and with resampled ones."""


def make_claims(
    paper: str, figure: Iterable[Comparison], samples: Iterable[Comparison]
) -> list[Claim]:
    """Returns a figure's claims with confidence intervals from its resampled values."""
    claims = []
    for row, sampled in zip(figure, samples, strict=True):
        published = find_published(paper, row.name)
        low, high = interval(sampled.ours)
        change = None
        if row.change:
            changed_low, changed_high = interval(sampled.changed)
            change = Change(
                what=row.change, ours=plain(row.changed), low=changed_low, high=changed_high
            )
        claims.append(
            Claim(
                paper=paper,
                name=row.name,
                where=published.where,
                what=published.what,
                paper_value=published.value,
                ours=plain(row.ours),
                low=low,
                high=high,
                basis=row.basis,
                change=change,
                reason=row.reason,
            )
        )
    return claims


def plain(value: Ours) -> float | str:
    return value if isinstance(value, str) else float(value)


def interval(samples: Ours) -> Interval:
    """Returns the 2.5th and the 97.5th percentile; None for words and for what does not vary."""
    if isinstance(samples, str) or np.ndim(samples) == 0:
        return None, None
    low, high = np.percentile(samples, (2.5, 97.5))
    return float(low), float(high)
