"""The trace format: `Trace` reads it, `TraceWriter` makes it; docstrings of both define it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collect.traces.layout import TraceSignal
    from collect.traces.manifest import TracePlan, TraceRequest
    from collect.traces.reader import Trace
    from collect.traces.writer import TraceWriter

__all__ = ["TraceRequest", "Trace", "TracePlan", "TraceSignal", "TraceWriter"]

MODULES = {
    "TraceRequest": "manifest",
    "Trace": "reader",
    "TracePlan": "manifest",
    "TraceSignal": "layout",
    "TraceWriter": "writer",
}
"""Imported when first used: configuration needs the names of signals, not arrow."""


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module 'collect.traces' has no attribute {name!r}")
    return getattr(import_module(f"collect.traces.{MODULES[name]}"), name)
