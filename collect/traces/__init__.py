"""The trace format: `Trace` reads it, `TraceWriter` makes it; docstrings of both define it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collect.errors import TraceError
    from collect.traces.column import Column
    from collect.traces.layout import TraceSignal
    from collect.traces.manifest import Request, TraceManifest, TracePlan
    from collect.traces.reader import Trace
    from collect.traces.split import Split
    from collect.traces.step import Phase, Step
    from collect.traces.writer import TraceWriter

HOMES = {
    "Column": "collect.traces.column",
    "Phase": "collect.traces.step",
    "Request": "collect.traces.manifest",
    "Split": "collect.traces.split",
    "Step": "collect.traces.step",
    "Trace": "collect.traces.reader",
    "TraceError": "collect.errors",
    "TraceManifest": "collect.traces.manifest",
    "TracePlan": "collect.traces.manifest",
    "TraceSignal": "collect.traces.layout",
    "TraceWriter": "collect.traces.writer",
}
"""Imported when first asked for: configuration needs the names of signals, not arrow."""

__all__ = [
    "Column",
    "Phase",
    "Request",
    "Split",
    "Step",
    "Trace",
    "TraceError",
    "TraceManifest",
    "TracePlan",
    "TraceSignal",
    "TraceWriter",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'collect.traces' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
