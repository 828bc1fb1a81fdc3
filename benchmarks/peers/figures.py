"""From the runs of one peer to its row."""

import statistics
from collections.abc import Callable
from typing import Any

Run = dict[str, Any]


def first_difference(answers: list[list[int]], expected: list[list[int]]) -> str:
    """`yes`, or the first token that differs; answers that ended early count as far as they go."""
    for number, (tokens, reference) in enumerate(zip(answers, expected, strict=True)):
        for position, (token, right) in enumerate(zip(tokens, reference, strict=False)):
            if token != right:
                return f"prompt {number}, token {position} of {len(reference)}"
    return "yes"


def tpots(run: Run) -> list[float]:
    """Seconds between tokens, of all prompts."""
    return [
        later - earlier
        for answer in run["answers"]
        for earlier, later in zip(answer["seconds"], answer["seconds"][1:], strict=False)
    ]


def decode_seconds(run: Run) -> float:
    """Mean time per token after the first: what tokens per second come from."""
    return statistics.fmean(tpots(run))


def read_per_token(run: Run) -> float:
    """Bytes from the disk for each token after the first."""
    total = sum(answer["read_bytes"][-1] - answer["read_bytes"][0] for answer in run["answers"])
    return total / len(tpots(run))


def row(runs: list[Run], expected: list[list[int]]) -> dict[str, Any]:
    """Medians over the runs; lowest and highest decode speed beside them."""

    def median(figure: Callable[[Run], float]) -> float:
        return statistics.median(figure(run) for run in runs)

    speeds = [1 / decode_seconds(run) for run in runs]
    equal = [
        first_difference([answer["tokens"] for answer in run["answers"]], expected) for run in runs
    ]
    return {
        "runs": len(runs),
        "ttft_seconds": median(
            lambda run: statistics.median(one["seconds"][0] for one in run["answers"])
        ),
        "tpot_seconds": median(lambda run: statistics.median(tpots(run))),
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_range": [min(speeds), max(speeds)],
        "new_tokens": min(sum(len(one["tokens"]) for one in run["answers"]) for run in runs),
        "read_bytes_per_token": median(read_per_token),
        "read_bytes_prefill": median(
            lambda run: statistics.median(one["read_bytes"][0] for one in run["answers"])
        ),
        "load_seconds": median(lambda run: run["load_seconds"]),
        "peak_resident_bytes": max(run["peak_resident_bytes"] for run in runs),
        "peak_anonymous_bytes": max(run["peak_anonymous_bytes"] for run in runs),
        "peak_cached_bytes": max(run["peak_cached_bytes"] for run in runs),
        "peak_charged_bytes": max(run["peak_charged_bytes"] for run in runs),
        "mean_charged_bytes": median(lambda run: run["mean_charged_bytes"]),
        "limiter_busy_seconds": median(lambda run: run["limiter_busy_seconds"]),
        "tokens_as_transformers": next((one for one in equal if one != "yes"), "yes"),
        "versions": runs[0]["versions"],
    }
