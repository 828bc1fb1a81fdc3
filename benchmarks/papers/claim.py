"""A number that a paper publishes, beside ours."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.papers.ground import Ground


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row of the table."""

    paper: str
    where: str
    """Figure or table, and section of the text that gives the number."""
    what: str
    paper_value: float | str
    ours: float | str | None
    reason: str = ""
    """Why the two differ, where they do."""


@dataclass
class Part:
    """All claims of one paper's figure, and the replays that they rest on."""

    claims: list[Claim] = field(default_factory=list)
    cells: list[dict[str, Any]] = field(default_factory=list)

    def keep(self, cell: dict[str, Any], **labels: Any) -> dict[str, Any]:
        self.cells.append({**labels, **cell})
        return cell


Figure = Callable[[Ground], Part]
Figures = Iterable[tuple[str, Figure]]


def average(cells: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]], key: str) -> float:
    """Mean over pairs of `base / cell`: how many times faster."""
    ratios = [b[key] / c[key] for c, b in zip(cells, base, strict=True)]
    return sum(ratios) / len(ratios)


def most(cells: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]], key: str) -> float:
    return max(b[key] / c[key] for c, b in zip(cells, base, strict=True))
