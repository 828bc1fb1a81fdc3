"""Tables in a terminal, whose columns are chosen by its width: no figure is ever cut."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from textwrap import wrap

from rich.console import Console
from rich.text import Text

from predictors.terminal import escape_controls

GAP = "  "
"""Between two columns."""
LEAST_NAME = 8
"""Fewest characters into which a name is folded."""


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table of texts."""

    title: str | None = None
    columns: Sequence[str]
    """Headings, all different."""
    rows: Sequence[Sequence[str] | str]
    """The cells of each row; a text alone begins a section."""
    left: int = 1
    """Number of columns that name a row: always shown, aligned to the left."""
    importance: Sequence[str] = ()
    """Headings, the most important first; the other columns follow in their order."""
    elsewhere: str = "results.json has them"
    """Place of the columns that do not fit, for the note below the table."""

    def print(self, console: Console) -> None:
        """Print the columns that fit, and which were left out; into a file or pipe all of them."""
        if any(escape_controls(text) != text for row in self.rows for text in row):
            safe = [
                escape_controls(row) if isinstance(row, str) else [*map(escape_controls, row)]
                for row in self.rows
            ]
            replace(self, rows=safe).print(console)
            return
        available = console.width if console.is_terminal else None
        shown = self.choose_columns(available)
        widths = self._fold_names(shown, available)
        lines = [Text(self.title or "", style="italic")] if self.title else []
        lines += [Text(line, style="bold") for line in self._lines(self.columns, widths)]
        lines.append(Text(GAP.join("─" * width for width in widths.values())))
        for row in self.rows:
            if isinstance(row, str):
                lines += [Text(), Text(row, style="bold")]
            else:
                lines += [Text(line) for line in self._lines(row, widths)]
        left_out = [name for name in self.columns if name not in shown]
        if left_out:
            note = f"left out for lack of width: {', '.join(left_out)}; {self.elsewhere}"
            lines.append(Text(note, style="dim"))
        for line in lines:
            console.print(line, soft_wrap=not console.is_terminal)
        console.print()

    def choose_columns(self, available: int | None) -> list[str]:
        """Return the headings that fit into a width, in their order; one figure at least."""
        named, others = list(self.columns[: self.left]), self.columns[self.left :]
        if available is None:
            return list(self.columns)
        rank = {name: place for place, name in enumerate(self.importance)}
        ranked = sorted(others, key=lambda name: rank.get(name, len(rank)))
        for number in range(len(ranked), 1, -1):
            shown = {*named, *ranked[:number]}
            if self._total(self._widths(shown)) <= available:
                return [name for name in self.columns if name in shown]
        return [*named, *ranked[:1]]

    def _widths(self, shown: Collection[str]) -> dict[int, int]:
        """Characters of the widest cell of each shown column."""
        cells = [self.columns, *(row for row in self.rows if not isinstance(row, str))]
        return {
            i: max(len(row[i]) for row in cells)
            for i, heading in enumerate(self.columns)
            if heading in shown
        }

    @staticmethod
    def _total(widths: dict[int, int]) -> int:
        return sum(widths.values()) + len(GAP) * (len(widths) - 1)

    def _fold_names(self, shown: Collection[str], available: int | None) -> dict[int, int]:
        """Return the columns' widths, with the widest names folded if the table is too wide."""
        widths = self._widths(shown)
        while available is not None and (excess := self._total(widths) - available) > 0:
            widest = max(range(self.left), key=lambda i: widths[i])
            if widths[widest] <= LEAST_NAME:
                break
            widths[widest] = max(LEAST_NAME, widths[widest] - excess)
        return widths

    def _lines(self, row: Sequence[str], widths: dict[int, int]) -> list[str]:
        """Return the lines of a row: several where a name is folded."""
        parts = [wrap(row[i], width) or [""] for i, width in widths.items()]
        return [
            GAP.join(
                text.ljust(width) if i < self.left else text.rjust(width)
                for (i, width), text in zip(widths.items(), line, strict=True)
            ).rstrip()
            for line in zip_longest(*parts, fillvalue="")
        ]
