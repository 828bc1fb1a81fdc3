"""Expands the comma lists of `-m` to the options of each run."""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from configs.compose import declared_type
from predictors.errors import ConfigError
from predictors.typed_values import is_text

MOST_RUNS = 10_000
"""Runs of one sweep at most: more are a slip of the keyboard, and would not fit in memory."""

WORD = re.compile(r"""\s*(?:'((?:\\.|[^'\\])*)'|"((?:\\.|[^"\\])*)"|([^,]*?))\s*,""", re.DOTALL)
"""A text and the comma after it, which quotes may enclose."""


def expand_sweep(schema: type, options: Sequence[str]) -> list[list[str]]:
    """Returns every combination of the comma lists in the options.

    In a text, quotes keep commas together, and are then no part of it: `prompt='a, b'`; elsewhere
    brackets do: `logger=[csv,wandb]`.

    Raises:
        ConfigError: an unknown option, or more than `MOST_RUNS` runs.
    """
    axes = []
    for option in options:
        key, _, text = option.partition("=")
        values = split_values(text, declared_type(schema, key))
        axes.append([f"{key}={value}" for value in values])
    if (num_runs := math.prod(map(len, axes))) > MOST_RUNS:
        raise ConfigError(f"-m makes {num_runs:,} runs of these options; at most {MOST_RUNS:,}")
    return [list(combination) for combination in itertools.product(*axes)]


def split_values(text: str, declared: Any) -> list[str]:
    if is_text(declared):
        return ["".join(parts) for parts in WORD.findall(f"{text},")]
    values, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth <= 0:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]
