"""Bench outcomes made by hand."""

from typing import Any

from runtime.config import SystemConfig
from runtime.tools.bench.tasks import CaseOutcome, ServedRun
from runtime.tools.comparison import Case, Condition, Variant

ZERO = {
    "hits": 0, "requests": 0, "bytes_moved": 0, "bytes_wasted": 0, "bytes_late": 0,
    "stall_seconds": 0.0, "predictor_seconds": 0.0, "link_seconds": 0.0,
}  # fmt: skip


def made_run(**fields: Any) -> ServedRun:
    """Make a run of one request of three new tokens; `fields` replace the defaults."""
    values = {
        "tokens": [[[1, 2, 3]]], "prefill": ZERO, "decode": ZERO,
        "ttft_seconds": [1.0], "tpot_seconds": [0.1, 0.1], "wall_seconds": 1.5,
        "adaptive_prefetch": None, "predictor": None, "reuse_predictor": None, "note": None,
        "arena_bytes": 100, "arena_slots": 10, "weights_bytes": 50, "peak_memory_bytes": 400,
        "page_cache_bytes": 0,
    }  # fmt: skip
    return ServedRun(**values | fields)


def outcome(name: str, *, budget="50%", batch=1, number=1, **fields: Any) -> CaseOutcome:
    """A case with `number` equal runs."""
    case = Case(Variant(label=name, system=SystemConfig(name=name)), Condition(budget, batch))
    return CaseOutcome(case, [made_run(**fields) for _ in range(number)])
