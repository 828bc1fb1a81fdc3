"""Arrivals and lengths of requests from a public trace, scaled to a small machine.

Azure's LLM inference traces (Patel et al., Splitwise, ISCA 2024; in Microsoft's AzurePublicDataset,
CC-BY) are CSV files with the columns TIMESTAMP, ContextTokens, GeneratedTokens. They are not part
of this repository; `AzureLLMInferenceTrace_conv.csv` and `..._code.csv` are available there.
"""

import csv
import random
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from benchmarks.serving.rows import Arrival
from predictors.errors import MoecastError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LONGEST = 4.0
"""Longest length relative to the mean: longer ones are cut to fit the model's context."""


def read_arrivals(path: Path) -> list[Arrival]:
    """Reads a trace, in order of time.

    Raises:
        MoecastError: the file is not such a trace.
    """
    rows: list[tuple[datetime, int, int]] = []
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                time, prompt, new = (row[name] for name in COLUMNS)
                # The trace has seven digits of a second, Python six.
                rows.append((datetime.fromisoformat(time[:26]), int(prompt), int(new)))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise MoecastError(
            f"trace={path}: not a CSV file with {', '.join(COLUMNS)} ({error!r}); take "
            "AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset"
        ) from error
    rows.sort()
    return [Arrival((time - rows[0][0]).total_seconds(), *lengths) for time, *lengths in rows]


def choose_window(arrivals: Sequence[Arrival], number: int, *, seed: int) -> list[Arrival]:
    """Returns `number` successive arrivals from a random place: bursts stay bursts."""
    if len(arrivals) < number:
        raise MoecastError(f"requests={number}: the trace has {len(arrivals)}")
    start = random.Random(seed).randrange(len(arrivals) - number + 1)
    return list(arrivals[start : start + number])


def scale_arrivals(
    arrivals: Sequence[Arrival], *, rate: float, prompt_tokens: float, new_tokens: float
) -> list[Arrival]:
    """Returns the same pattern with other means.

    Args:
        arrivals: Successive arrivals.
        rate: Requests per second over all of them.
        prompt_tokens: Mean length before the longest are cut.
        new_tokens: The same of answers.
    """
    first, last = arrivals[0].seconds, arrivals[-1].seconds
    stretch = (len(arrivals) - 1) / rate / (last - first) if last > first else 0.0
    return [
        Arrival((arrival.seconds - first) * stretch, prompt, new)
        for arrival, prompt, new in zip(
            arrivals,
            scale_lengths([arrival.prompt_tokens for arrival in arrivals], prompt_tokens),
            scale_lengths([arrival.new_tokens for arrival in arrivals], new_tokens),
            strict=True,
        )
    ]


def scale_lengths(lengths: Sequence[int], mean: float) -> list[int]:
    """Scales lengths to a mean; each is at least one and at most `LONGEST` times the mean."""
    factor = mean * len(lengths) / max(1, sum(lengths))
    return [max(1, round(min(length * factor, LONGEST * mean))) for length in lengths]
