"""When requests came and how long they were, of a public trace, scaled to a small machine.

Azure's LLM inference traces (Patel et al., Splitwise, ISCA 2024; in Microsoft's AzurePublicDataset,
CC-BY) are CSV files with the columns TIMESTAMP, ContextTokens, GeneratedTokens. They are not part
of this repository: whoever wants to replay `AzureLLMInferenceTrace_conv.csv` or `..._code.csv` gets
it there.
"""

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from predictors.errors import MoecastError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LONGEST = 4.0
"""Of a length's mean: what is longer is cut there, so that all fits the model's context."""


@dataclass(frozen=True)
class Arrival:
    seconds: float
    """Since the first."""
    prompt_tokens: int
    new_tokens: int


def read(path: Path) -> list[Arrival]:
    """All of a file, in order of time.

    Raises:
        MoecastError: it is no such file.
    """
    rows: list[tuple[datetime, int, int]] = []
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                time, prompt, new = (row[name] for name in COLUMNS)
                # Seven digits of a second; Python knows six.
                rows.append((datetime.fromisoformat(time[:26]), int(prompt), int(new)))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise MoecastError(
            f"trace={path}: not a CSV file with {', '.join(COLUMNS)} ({error!r}); take "
            "AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset"
        ) from error
    rows.sort()
    return [Arrival((time - rows[0][0]).total_seconds(), *lengths) for time, *lengths in rows]


def window(arrivals: Sequence[Arrival], number: int, *, seed: int) -> list[Arrival]:
    """So many in a row, from a random place: bursts stay bursts."""
    if len(arrivals) < number:
        raise MoecastError(f"requests={number}: the trace has {len(arrivals)}")
    start = random.Random(seed).randrange(len(arrivals) - number + 1)
    return list(arrivals[start : start + number])


def scaled(
    arrivals: Sequence[Arrival], *, rate: float, prompt_tokens: float, new_tokens: float
) -> list[Arrival]:
    """The same pattern with other means.

    Args:
        rate: requests a second, over all of them.
        prompt_tokens, new_tokens: mean lengths, before the longest are cut.
    """
    first, last = arrivals[0].seconds, arrivals[-1].seconds
    stretch = (len(arrivals) - 1) / rate / (last - first) if last > first else 0.0
    return [
        Arrival((one.seconds - first) * stretch, prompt, new)
        for one, prompt, new in zip(
            arrivals,
            lengths([one.prompt_tokens for one in arrivals], prompt_tokens),
            lengths([one.new_tokens for one in arrivals], new_tokens),
            strict=True,
        )
    ]


def lengths(found: Sequence[int], mean: float) -> list[int]:
    """Each times the same factor; at least one, at most `LONGEST` times the mean."""
    factor = mean * len(found) / max(1, sum(found))
    return [max(1, round(min(one * factor, LONGEST * mean))) for one in found]
