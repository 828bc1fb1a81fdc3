"""A report: a list of headings, each with a table, a figure of a table, or a note alone.

    report = HtmlReport("Predictors", "qwen2-moe-tiny")
    report.add("What this is", note="A paragraph; `backticks` are code.")
    report.add("Summary", table)
    report.add("Accuracy by layer", table, draw_accuracy)
    report.write(folder)  # report.html, summary.csv, accuracy-by-layer.csv, accuracy-by-layer.png

The HTML file is self-contained. matplotlib is imported when a report with figures is written.
"""

import base64
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from predictors.files import write_atomic
from predictors.table import Table
from runtime.tools.report.figures import INCHES, Draw, render_figure
from runtime.tools.report.provenance import Provenance
from runtime.tools.report.series_styles import STYLES

FILE = "report.html"


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """A heading with a table, which a figure may show, and a note of one or more lines."""

    name: str
    """Name of its files, and of its place on the page."""
    heading: str
    table: Table | None = None
    draw: Draw | None = None
    inches: tuple[float, float] = INCHES
    note: str = ""
    origin: str = ""
    """Line below the figure."""

    def csv(self) -> bytes:
        """Write the table's exact values."""
        assert self.table is not None, self.name
        return self.table.csv().encode()

    def write(self, folder: Path, kind: str = "png") -> bytes:
        """Write the values, and the figure with its heading; returns the figure if there is one."""
        if self.table is None:
            return b""
        write_atomic(folder / f"{self.name}.csv", self.csv())
        if self.draw is None:
            return b""
        picture = render_figure(
            self.draw,
            self.table.records(),
            inches=self.inches,
            kind=kind,
            title=self.heading,
            foot=self.origin,
        )
        write_atomic(folder / f"{self.name}.{kind}", picture)
        return picture


class HtmlReport:
    """A report with sections in the order in which they are added.

    Args:
        provenance: origin of the numbers, written below each figure; None: not recorded.
    """

    def __init__(self, title: str, subtitle: str = "", *, provenance: Provenance | None = None):
        self.title, self.subtitle, self.provenance = title, subtitle, provenance
        self.sections: list[ReportSection] = []

    def add(
        self,
        heading: str,
        table: Table | None = None,
        draw: Draw | None = None,
        *,
        note: str = "",
        name: str | None = None,
        inches: tuple[float, float] = INCHES,
    ) -> None:
        """Add a section.

        Args:
            table: shown, or where `draw` is given only drawn; `NAME.csv` has its exact values.
            draw: draws the table's records as `NAME.png`.
            note: paragraphs; parts in backticks are shown as code.
            name: of the files; the heading's slug by default.
        """
        name = name or slug(heading)
        assert name not in {section.name for section in self.sections}, name
        self.sections.append(
            ReportSection(
                name=name,
                heading=heading,
                table=table,
                draw=draw,
                inches=inches,
                note=note,
                origin="" if self.provenance is None else self.provenance.line(),
            )
        )

    def write(self, folder: Path) -> Path:
        """Write PNGs, CSVs and finally the page; returns the page's path."""
        pictures = {section.name: section.write(folder) for section in self.sections}
        pages = Environment(
            loader=FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        pages.filters["inline"] = inline
        pages.filters["base64"] = lambda data: base64.b64encode(data).decode()
        page = pages.get_template("html_report.jinja")
        html = page.render(vars(self), pictures=pictures, styles=STYLES)
        path = folder / FILE
        write_atomic(path, html.encode())
        return path

    def write_figures(self, folder: Path, kind: str) -> list[Path]:
        """Write the figures alone, as `svg` or `png`, with their CSVs; returns their paths."""
        drawn = [section for section in self.sections if section.draw is not None]
        for section in drawn:
            section.write(folder, kind)
        return [folder / f"{section.name}.{kind}" for section in drawn]


def slug(heading: str) -> str:
    """Return the name of a section's files."""
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def inline(text: str) -> Markup:
    """Escape text and show parts in backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text)))
