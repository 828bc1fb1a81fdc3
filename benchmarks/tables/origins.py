"""Command, date, revision and machine of committed results, for the line under each table."""

import json
from typing import Any

from benchmarks.reports import RESULTS
from benchmarks.tables.markdown import read_document
from runtime.tools.report.provenance import Provenance


def read_origin(name: str, part: str | None = None) -> Provenance:
    """Returns the origin of a committed result.

    Results of earlier versions do not have it; `results/origins.json` has theirs.

    Args:
        part: Key of a part with an origin of its own, in a file of several parts.
    """
    document: dict[str, Any] = read_document(name) or {}
    if part is not None:
        document = document[part]
    origin = document.get("origin")
    if origin is None:
        origin = json.loads((RESULTS / "origins.json").read_text())[part or name]
    return Provenance(**origin)


def origin_line(name: str, part: str | None = None) -> list[str]:
    """Returns the line that stands under a table, and an empty one."""
    command, *others = read_origin(name, part).line().split(" · ")
    return [" · ".join([f"`{command}`", *others]), ""]
