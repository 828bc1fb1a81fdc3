"""The table of a live run's statistics."""

from typing import Any

from predictors.table import Table
from predictors.units import MIB


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{100 * value:.1f} %"


def _milliseconds(value: float | None) -> str:
    return "not measured" if value is None else f"{1000 * value:.1f} ms"


def _mebibytes(value: int) -> str:
    return f"{value / MIB:.1f} MiB"


def _rate(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens / seconds:.1f} tokens/s"


def make_stats_table(
    stats: dict[str, Any], *, budget: str, system: str, answer: dict[str, Any] | None = None
) -> Table:
    """Make a table of speed, hits, bytes and memory.

    Args:
        stats: of the engine.
        budget: as it was given.
        system: its name.
        answer: `num_prompt_tokens`, `num_tokens`, `first_token_seconds` and `seconds` of one
            generated text, for its throughput.
    """
    prefill = _milliseconds(stats["ttft_seconds"])
    decode = f"{_milliseconds(stats['tpot_seconds'])} per token"
    if answer is not None:
        first, num_tokens = answer["first_token_seconds"], answer["num_tokens"]
        prefill = f"{_milliseconds(first)}, {_rate(answer['num_prompt_tokens'], first)}"
        if num_tokens > 1:
            seconds = answer["seconds"] - first
            per_token = _milliseconds(seconds / (num_tokens - 1))
            decode = f"{_rate(num_tokens - 1, seconds)}, {per_token} per token"
    return Table.facts(
        {
            "prefill: time to first token (TTFT)": prefill,
            "decode: time per output token (TPOT)": decode,
            "experts requested": f"{stats['requests']}",
            "hits": f"{stats['hits']} ({_share(stats['hit_rate'])})",
            "joined in transfer": f"{stats['joins']}",
            "misses": f"{stats['misses']}",
            "predicted and fetched in time (FetchRate)": _share(stats["fetch_rate"]),
            "needed experts predicted and in time": _share(stats["promoe_good_pred"]),
            "bytes moved": _mebibytes(stats["bytes_moved"]),
            "bytes prefetched": _mebibytes(stats["bytes_prefetched"]),
            "bytes prefetched and wasted": _mebibytes(stats["bytes_wasted"]),
            "time waiting for experts": _milliseconds(stats["stall_seconds"]),
            "time in the predictor": _milliseconds(stats["predictor_seconds"]),
            "memory for experts": _mebibytes(stats["arena_bytes"]),
            "peak memory of the process": _mebibytes(stats["peak_memory_bytes"]),
        },
        f"system {system}, budget {budget}",
    )
