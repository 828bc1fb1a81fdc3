"""The statistics of a live run as a person reads them."""

from typing import Any

from rich.table import Table

from predictors.units import MIB


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{100 * value:.1f} %"


def _milliseconds(value: float | None) -> str:
    return "not measured" if value is None else f"{1000 * value:.1f} ms"


def _mebibytes(value: int) -> str:
    return f"{value / MIB:.1f} MiB"


def stats_table(stats: dict[str, Any], *, budget: str, system: str) -> Table:
    """Hits, bytes, times and memory of a run."""
    table = Table(title=f"system {system}, budget {budget}", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    rows = {
        "experts asked for": f"{stats['requests']}",
        "hits": f"{stats['hits']} ({_share(stats['hit_rate'])})",
        "joined in flight": f"{stats['joins']}",
        "misses": f"{stats['misses']}",
        "predicted experts there in time (FetchRate)": _share(stats["fetch_rate"]),
        "needed experts predicted and in time": _share(stats["joint_rate"]),
        "bytes moved": _mebibytes(stats["bytes_moved"]),
        "bytes prefetched": _mebibytes(stats["bytes_prefetched"]),
        "  of these used": _mebibytes(stats["bytes_used"]),
        "  of these wasted": _mebibytes(stats["bytes_wasted"]),
        "  of these not asked for yet": _mebibytes(stats["bytes_prefetched_unused_yet"]),
        "predicted, but late": _mebibytes(stats["bytes_late"]),
        "time to first token (TTFT)": _milliseconds(stats["ttft_seconds"]),
        "time per output token (TPOT, median)": _milliseconds(stats["tpot_seconds"]),
        "stalled waiting for experts": _milliseconds(stats["stall_seconds"]),
        "spent in the predictor": _milliseconds(stats["predictor_seconds"]),
        "memory for experts": _mebibytes(stats["arena_bytes"]),
        "peak memory of the process": _mebibytes(stats["peak_memory_bytes"]),
    }
    for what, value in rows.items():
        table.add_row(what, value)
    return table
