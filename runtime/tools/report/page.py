"""One HTML file with text, tables and figures that loads nothing: it can be mailed as it is.

    page = Page("Predictors", "qwen2-moe-tiny")
    page.text("What this is", ["A paragraph; `backticks` are code."])
    page.table("Summary", ["predictor", "accuracy"], [["skip", 0.79]])
    page.figure("accuracy", "Accuracy by layer", draw, ["layer", "accuracy"], rows)
    page.write(folder)  # report.html, accuracy.png, accuracy.csv, summary.csv

matplotlib is imported when a page with figures is written, not before.
"""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from predictors.files import write_atomic
from runtime.tools.report.cells import Cell, csv_text, inline, table_html
from runtime.tools.report.drawing import DARK, INCHES, LIGHT, Draw, drawn

FILE = "report.html"
STYLE = Path(__file__).with_name("page.css")
LISTED = 4
"""Sections from which a table of contents helps."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, paragraphs below it, and perhaps values that are shown as a table or a figure."""

    name: str
    heading: str
    paragraphs: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    draw: Draw | None = None
    inches: tuple[float, float] = INCHES


class Page:
    """Sections in the order in which they were added."""

    def __init__(self, title: str, subtitle: str = ""):
        self.title, self.subtitle = title, subtitle
        self.sections: list[Section] = []

    def text(self, heading: str, paragraphs: Sequence[str]) -> None:
        """Paragraphs of plain text; what stands in backticks is shown as code."""
        self._add(Section(name=slug(heading), heading=heading, paragraphs=tuple(paragraphs)))

    def table(
        self,
        heading: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        *,
        note: str = "",
        name: str | None = None,
    ) -> None:
        """Values as a table that scrolls where it does not fit.

        `NAME.csv` holds them in full (`name` is made from the heading unless given). None is shown
        as a dash.
        """
        self._add(
            Section(
                name=name or slug(heading),
                heading=heading,
                paragraphs=(note,) if note else (),
                columns=tuple(columns),
                rows=tuple(map(tuple, rows)),
            )
        )

    def figure(
        self,
        name: str,
        heading: str,
        draw: Draw,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        *,
        note: str = "",
        inches: tuple[float, float] = INCHES,
    ) -> None:
        """A drawing (see `drawing`) with the values that it shows.

        `NAME.png` and `NAME.csv` are written beside the page.
        """
        self._add(
            Section(
                name=name,
                heading=heading,
                paragraphs=(note,) if note else (),
                columns=tuple(columns),
                rows=tuple(map(tuple, rows)),
                draw=draw,
                inches=inches,
            )
        )

    def _add(self, section: Section) -> None:
        assert section.name not in {one.name for one in self.sections}, section.name
        assert all(len(row) == len(section.columns) for row in section.rows), section.name
        self.sections.append(section)

    def write(self, folder: Path) -> Path:
        """Draws, and writes the page and its PNGs and CSVs, the page last; returns its path."""
        blocks = [self._block(section, folder) for section in self.sections]
        contents = ""
        if len(self.sections) >= LISTED:
            listed = "\n".join(
                f'<li><a href="#{one.name}">{escape(one.heading)}</a></li>' for one in self.sections
            )
            contents = f'<nav aria-label="Contents"><ol>\n{listed}\n</ol></nav>'
        subtitle = f'<p class="subtitle">{inline(self.subtitle)}</p>' if self.subtitle else ""
        lines = [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # A browser that opens the page from a server would ask for an icon otherwise.
            '<link rel="icon" href="data:,">',
            f"<title>{escape(self.title)}</title>\n<style>\n{STYLE.read_text()}</style>",
            f"</head>\n<body>\n<header><h1>{escape(self.title)}</h1>{subtitle}</header>\n<main>",
            contents,
            *blocks,
            "</main>\n<footer>A dash: not measured. Numbers in full: the CSV of each figure and "
            "table.</footer>\n</body>\n</html>\n",
        ]
        path = folder / FILE
        write_atomic(path, "\n".join(lines).encode())
        return path

    def _block(self, section: Section, folder: Path) -> str:
        """One section's HTML; writes its files."""
        lines = [f'<section id="{section.name}">\n<h2>{escape(section.heading)}</h2>']
        links = []
        if section.draw is not None:
            light, png = drawn(section.draw, LIGHT, inches=section.inches, kinds=("svg", "png"))
            (dark,) = drawn(section.draw, DARK, inches=section.inches, kinds=("svg",))
            write_atomic(folder / f"{section.name}.png", png)
            links.append(download(f"{section.name}.png", "image/png", png))
            lines.append(
                '<figure><picture><source media="(prefers-color-scheme: dark)" '
                f'srcset="{data_uri("image/svg+xml", dark)}">'
                f'<img src="{data_uri("image/svg+xml", light)}" alt="{escape(section.heading)}">'
                "</picture></figure>"
            )
        elif section.columns:
            lines.append(f'<div class="scroll">{table_html(section.columns, section.rows)}</div>')
        tone = ' class="note"' if section.columns else ""
        lines += [f"<p{tone}>{inline(one)}</p>" for one in section.paragraphs]
        if section.columns:
            data = csv_text(section.columns, section.rows).encode()
            write_atomic(folder / f"{section.name}.csv", data)
            links.insert(0, download(f"{section.name}.csv", "text/csv", data))
            lines.append(f'<p class="files">{" · ".join(links)}</p>')
        return "\n".join([*lines, "</section>"])


def slug(heading: str) -> str:
    """A heading as the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def download(name: str, kind: str, data: bytes) -> str:
    """A link that carries what it gives, so that it works wherever the page lies."""
    return f'<a download="{escape(name)}" href="{data_uri(kind, data)}">{escape(name)}</a>'
