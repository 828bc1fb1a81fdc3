"""Command, date, revision and machine of committed results, for the line under each table."""

from typing import Any

from benchmarks.tables.markdown import read_document
from runtime.tools.report.provenance import Provenance


def read_origin(name: str, part: str | None = None) -> Provenance:
    """Returns the origin of a committed result.

    Args:
        part: Key of a part, in a file of several parts with an origin each.
    """
    document: dict[str, Any] = read_document(name) or {}
    if part is not None:
        document = document[part]
    return Provenance(**document["origin"])


def origin_line(name: str, part: str | None = None) -> list[str]:
    """Returns the line that stands under a table, and an empty one."""
    command, *others = read_origin(name, part).line().split(" · ")
    return [" · ".join([f"`{command}`", *others]), ""]
