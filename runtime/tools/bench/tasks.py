"""Tasks of the bench's child processes and the results of a served run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.tools.bench.config import BenchConfig
from runtime.tools.bench.workload import BenchRequest
from runtime.tools.comparison import Case

Tokens = list[list[list[int]]]
"""New token ids by request and row."""


@dataclass(frozen=True, kw_only=True)
class ServeTask:
    """Serve the requests with a case's system from an empty arena and measure."""

    config: BenchConfig
    case: Case
    requests: list[BenchRequest]
    trace_events: Path | None = None


@dataclass(frozen=True, kw_only=True)
class RequestsTask:
    """Generate with plain Transformers, or record the routing and replay the bounds."""

    config: BenchConfig
    requests: dict[int, list[BenchRequest]]
    """By batch size."""


@dataclass(frozen=True, kw_only=True)
class ServedRun:
    """Measurements of one served run; all but `tokens` are of the measured requests alone."""

    tokens: Tokens
    """Tokens of all requests, the warm-up included."""
    ttft_seconds: list[float]
    tpot_seconds: list[float]
    """Times of all decode steps."""
    wall_seconds: float
    prefill: dict[str, float]
    """Counters and times (`*_seconds`) summed over the prefills."""
    decode: dict[str, float]
    """The same, summed over the decode steps."""
    adaptive_prefetch: dict[str, Any] | None
    predictor: str | None
    reuse_predictor: str | None
    note: str | None
    """Deviation of the run from its system's definition; None: no deviation."""
    arena_bytes: int
    arena_slots: int
    weights_bytes: int
    peak_memory_bytes: int
    threads: int
    page_cache_bytes: int | None = None
    """Bytes of the model's files that the run left in the page cache; None where unknown."""
