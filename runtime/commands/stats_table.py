"""The table of a live run's statistics."""

from typing import Any

from rich.table import Table

from predictors.units import MIB
from runtime.tools.report.tables import fact_table


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{100 * value:.1f} %"


def _milliseconds(value: float | None) -> str:
    return "not measured" if value is None else f"{1000 * value:.1f} ms"


def _mebibytes(value: int) -> str:
    return f"{value / MIB:.1f} MiB"


def make_stats_table(stats: dict[str, Any], *, budget: str, system: str) -> Table:
    """Make a table of hits, bytes, times and memory."""
    return fact_table(
        f"system {system}, budget {budget}",
        {
            "experts requested": f"{stats['requests']}",
            "hits": f"{stats['hits']} ({_share(stats['hit_rate'])})",
            "joined in transfer": f"{stats['joins']}",
            "misses": f"{stats['misses']}",
            "predicted experts that arrived in time (FetchRate)": _share(stats["fetch_rate"]),
            "needed experts that were predicted and in time": _share(stats["joint_rate"]),
            "bytes moved": _mebibytes(stats["bytes_moved"]),
            "bytes prefetched": _mebibytes(stats["bytes_prefetched"]),
            "  used": _mebibytes(stats["bytes_used"]),
            "  wasted": _mebibytes(stats["bytes_wasted"]),
            "  not requested yet": _mebibytes(stats["bytes_prefetched_unused_yet"]),
            "predicted, but late": _mebibytes(stats["bytes_late"]),
            "time to first token (TTFT)": _milliseconds(stats["ttft_seconds"]),
            "time per output token (TPOT), median": _milliseconds(stats["tpot_seconds"]),
            "stall time waiting for experts": _milliseconds(stats["stall_seconds"]),
            "time in the predictor": _milliseconds(stats["predictor_seconds"]),
            "memory for experts": _mebibytes(stats["arena_bytes"]),
            "peak memory of the process": _mebibytes(stats["peak_memory_bytes"]),
        },
    )
