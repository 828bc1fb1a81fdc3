"""A self-contained HTML file with text, tables and figures.

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
from runtime.tools.report.figures import (
    DARK,
    INCHES,
    LIGHT,
    ColorScheme,
    Draw,
    render_figure,
)
from runtime.tools.report.provenance import Provenance
from runtime.tools.report.table_cells import Cell, inline, table_html, write_csv

FILE = "report.html"
STYLE = Path(__file__).with_name("html_report.css")
LISTED = 4
"""Number of sections from which there is a table of contents."""


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """A heading with paragraphs and optional values, shown as a table or a figure."""

    name: str
    heading: str
    paragraphs: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    draw: Draw | None = None
    inches: tuple[float, float] = INCHES


class HtmlReport:
    """A report with sections in the order in which they are added.

    Args:
        provenance: origin of the numbers, written below each figure; None: not recorded.
    """

    def __init__(self, title: str, subtitle: str = "", *, provenance: Provenance | None = None):
        self.title, self.subtitle, self.provenance = title, subtitle, provenance
        self.sections: list[ReportSection] = []

    def text(self, heading: str, paragraphs: Sequence[str]) -> None:
        """Add paragraphs of plain text; parts in backticks are shown as code."""
        self._add(ReportSection(name=slug(heading), heading=heading, paragraphs=tuple(paragraphs)))

    def table(
        self,
        heading: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        *,
        note: str = "",
        name: str | None = None,
    ) -> None:
        """Add a table, which scrolls if it is too wide.

        `NAME.csv` has the exact values; `name` defaults to the heading's slug. None is shown as a
        dash.
        """
        self.figure(name or slug(heading), heading, None, columns, rows, note=note)

    def figure(
        self,
        name: str,
        heading: str,
        draw: Draw | None,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        *,
        note: str = "",
        inches: tuple[float, float] = INCHES,
    ) -> None:
        """Add a figure (see `figures`) with the values that it shows.

        `NAME.png` and `NAME.csv` are written next to the report.
        """
        self._add(
            ReportSection(
                name=name,
                heading=heading,
                paragraphs=(note,) if note else (),
                columns=tuple(columns),
                rows=tuple(map(tuple, rows)),
                draw=draw,
                inches=inches,
            )
        )

    def _add(self, section: ReportSection) -> None:
        assert section.name not in {other.name for other in self.sections}, section.name
        assert all(len(row) == len(section.columns) for row in section.rows), section.name
        self.sections.append(section)

    def write(self, folder: Path) -> Path:
        """Draw, and write PNGs, CSVs and finally the report; returns the report's path."""
        blocks = [self._block(section, folder) for section in self.sections]
        contents = ""
        if len(self.sections) >= LISTED:
            listed = "\n".join(
                f'<li><a href="#{section.name}">{escape(section.heading)}</a></li>'
                for section in self.sections
            )
            contents = f'<nav aria-label="Contents"><ol>\n{listed}\n</ol></nav>'
        subtitle = f'<p class="subtitle">{inline(self.subtitle)}</p>' if self.subtitle else ""
        origin = ""
        if self.provenance is not None:
            origin = f"<br><code>{escape(self.provenance.line())}</code>"
        lines = [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # Without it a browser would request an icon from the server.
            '<link rel="icon" href="data:,">',
            f"<title>{escape(self.title)}</title>\n<style>\n{STYLE.read_text()}</style>",
            f"</head>\n<body>\n<header><h1>{escape(self.title)}</h1>{subtitle}</header>\n<main>",
            contents,
            *blocks,
            f"</main>\n<footer>A dash means not measured. The CSV of each figure and table has the "
            f"exact numbers.{origin}</footer>\n</body>\n</html>\n",
        ]
        path = folder / FILE
        write_atomic(path, "\n".join(lines).encode())
        return path

    def write_figures(self, folder: Path, kind: str) -> list[Path]:
        """Write the figures alone, as `svg` or `png`, with their CSVs; returns their paths."""
        drawn = [section for section in self.sections if section.draw is not None]
        for section in drawn:
            self._write_values(section, folder)
            self._write_figure(section, folder, kind)
        return [folder / f"{section.name}.{kind}" for section in drawn]

    def _write_figure(self, section: ReportSection, folder: Path, kind: str) -> bytes:
        """Write a figure with its heading, which a file that stands alone needs."""
        data = self._render(section, kind, title=section.heading)
        write_atomic(folder / f"{section.name}.{kind}", data)
        return data

    def _write_values(self, section: ReportSection, folder: Path) -> bytes:
        data = write_csv(section.columns, section.rows).encode()
        write_atomic(folder / f"{section.name}.csv", data)
        return data

    def _render(
        self, section: ReportSection, kind: str, colours: ColorScheme = LIGHT, *, title: str = ""
    ) -> bytes:
        """Draw a section's figure as `svg` or `png`, with its origin below it."""
        assert section.draw is not None
        foot = "" if self.provenance is None else self.provenance.line()
        return render_figure(
            section.draw, colours, inches=section.inches, kind=kind, title=title, foot=foot
        )

    def _block(self, section: ReportSection, folder: Path) -> str:
        """Make one section's HTML and write its files."""
        lines = [f'<section id="{section.name}">\n<h2>{escape(section.heading)}</h2>']
        links = []
        if section.draw is not None:
            light, dark = (self._render(section, "svg", colours) for colours in (LIGHT, DARK))
            png = self._write_figure(section, folder, "png")
            links.append(download_link(f"{section.name}.png", "image/png", png))
            lines.append(
                '<figure><picture><source media="(prefers-color-scheme: dark)" '
                f'srcset="{data_uri("image/svg+xml", dark)}">'
                f'<img src="{data_uri("image/svg+xml", light)}" alt="{escape(section.heading)}">'
                "</picture></figure>"
            )
        elif section.columns:
            lines.append(f'<div class="scroll">{table_html(section.columns, section.rows)}</div>')
        tone = ' class="note"' if section.columns else ""
        lines += [f"<p{tone}>{inline(paragraph)}</p>" for paragraph in section.paragraphs]
        if section.columns:
            data = self._write_values(section, folder)
            links.insert(0, download_link(f"{section.name}.csv", "text/csv", data))
            lines.append(f'<p class="files">{" · ".join(links)}</p>')
        return "\n".join([*lines, "</section>"])


def slug(heading: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def download_link(name: str, kind: str, data: bytes) -> str:
    """Make a link that contains its file, so that the report works anywhere."""
    return f'<a download="{escape(name)}" href="{data_uri(kind, data)}">{escape(name)}</a>'
