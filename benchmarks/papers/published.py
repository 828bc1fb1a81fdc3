"""The papers' figures as they print them (`published.yaml`)."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

NUMBER = re.compile(r"(\d+(?:\.\d+)?) ?(K|%|×|x|X|ms|us|s|MB|tokens/s)?")

SCALES = {"K": 1e3, "%": 0.01, "ms": 1e-3, "us": 1e-6, "MB": 1e6}
"""Factors of what stands behind a number; times become seconds, percentages shares."""


@dataclass(frozen=True, kw_only=True)
class PublishedFigure:
    """A figure of a paper."""

    paper: str
    name: str
    """Unique in its paper."""
    where: str
    """Figure or table, and section."""
    what: str
    source: str
    """The quoted sentence, or the title of the table."""
    printed: str
    """The value as printed."""
    not_replayed: str | None
    """Reason why no replay stands next to it; None: one does."""

    @property
    def value(self) -> float | str:
        """The number, or the words in which a paper compares without one."""
        match = NUMBER.fullmatch(self.printed)
        if match is None:
            return self.printed
        return float(match[1]) * SCALES.get(match[2] or "", 1.0)


@cache
def read_published() -> dict[tuple[str, str], PublishedFigure]:
    """Returns all figures by paper and name."""
    document = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())
    figures: dict[tuple[str, str], PublishedFigure] = {}
    for paper, groups in document.items():
        for group in groups:
            for figure in _list_figures(paper, group):
                key = paper, figure.name
                assert key not in figures, key
                figures[key] = figure
    return figures


def _list_figures(paper: str, group: dict[str, Any]) -> list[PublishedFigure]:
    common = {
        "paper": paper,
        "where": group["where"],
        "source": group.get("quote") or group["table"],
        "not_replayed": group.get("not_replayed"),
    }
    if "quote" in group:
        return [
            PublishedFigure(name=name, what=entry["what"], printed=entry["value"], **common)
            for name, entry in group["figures"].items()
        ]
    table = group["where"].split(",")[0].replace(" ", "-")
    return [
        PublishedFigure(
            name=f"{table}/{row}/{column}",
            what=group["what"].format(row=row, column=column),
            printed=cell + group.get("unit", ""),
            **common,
        )
        for row, cells in group["rows"].items()
        for column, cell in zip(group["columns"], cells, strict=True)
        if column not in group.get("settings", ())
    ]


def find_published(paper: str, name: str) -> PublishedFigure:
    return read_published()[paper, name]


def read_settings(paper: str, where: str) -> dict[str, dict[str, str]]:
    """Returns the cells of a table by row and column, its settings included."""
    document = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())
    (group,) = (group for group in document[paper] if group["where"] == where)
    return {
        row: dict(zip(group["columns"], cells, strict=True)) for row, cells in group["rows"].items()
    }
