"""Numbers that the papers publish, next to the replays' figures."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from benchmarks.papers.paper_context import PaperContext


@dataclass(frozen=True, kw_only=True)
class ReplayCell:
    """Figures of one replay; times in seconds, of the reference model's number of layers."""

    system: str
    shape: str
    hardware: str
    share: float
    """Share of all experts that fit."""
    slots: int
    batch: int
    tpot_seconds: float
    ttft_seconds: float
    """Mean of all prefills but the first, which finds an empty arena."""
    hit_rate: float | None
    decode_stall_seconds: float
    decode_stall_share: float
    prefill_stall_share: float
    decode_bytes: int
    prefill_bytes: int
    tokens_per_second: float
    figure: str | None = None
    """Figure that the replay belongs to."""
    limit_gb: float | None = None
    distance: int | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row of the comparison with the papers."""

    paper: str
    where: str
    """Figure or table, and the section of the text that gives the number."""
    what: str
    paper_value: float | str
    ours: float | str | None
    reason: str = ""
    """Why the two differ, if they do."""


@dataclass
class FigureReplay:
    """The claims of one figure, and the replays that they rest on."""

    paper: str
    claims: list[Claim] = field(default_factory=list)
    cells: list[ReplayCell] = field(default_factory=list)

    def claim(
        self,
        where: str,
        what: str,
        *,
        paper_value: float | str,
        ours: float | str | None,
        reason: str = "",
    ) -> None:
        """Adds a claim of this paper."""
        self.claims.append(
            Claim(
                paper=self.paper,
                where=where,
                what=what,
                paper_value=paper_value,
                ours=ours,
                reason=reason,
            )
        )

    def keep(self, cell: ReplayCell, figure: str, **labels: Any) -> ReplayCell:
        """Adds a replay with its labels, and returns it."""
        self.cells.append(replace(cell, figure=figure, **labels))
        return cell


@dataclass(frozen=True, kw_only=True)
class PapersReport:
    trace: str
    model: dict[str, object]
    new_tokens: int
    seconds: float
    claims: list[Claim]
    cells: list[ReplayCell]


Figures = Iterable[tuple[str, Callable[["PaperContext"], FigureReplay]]]


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def ratios(cells: Sequence[ReplayCell], base: Sequence[ReplayCell], key: str) -> list[float]:
    """Returns `base / cell` of a figure for each pair: how many times faster the cell is."""
    return [getattr(b, key) / getattr(c, key) for c, b in zip(cells, base, strict=True)]


def mean_ratio(cells: Sequence[ReplayCell], base: Sequence[ReplayCell], key: str) -> float:
    return mean(ratios(cells, base, key))


def max_ratio(cells: Sequence[ReplayCell], base: Sequence[ReplayCell], key: str) -> float:
    return max(ratios(cells, base, key))


def hit_rate(cells: Sequence[ReplayCell]) -> float:
    """Returns the mean hit rate of the cells' decode steps."""
    return mean(cell.hit_rate or 0.0 for cell in cells)
