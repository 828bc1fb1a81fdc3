"""Expands the comma lists and ranges of `-m` to the options of each run."""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    Glob,
    IntervalSweep,
    Override,
    QuotedString,
    RangeSweep,
    Transformer,
)
from hydra.errors import HydraException

from configs.compose import compose_defaults, declared_type, one_line
from configs.errors import ConfigError
from configs.values import is_text

MOST_RUNS = 10_000
"""Runs of one sweep at most: more are a slip of the keyboard, and would not fit in memory."""

QUOTES = ("'", '"')
WORD = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^,\s'"](?:[^,]*[^,\s])?""")
"""A text between commas, which quotes may enclose."""


def expand_sweep(root: str, arguments: Sequence[str]) -> list[list[str]]:
    """Returns every combination of the comma lists and ranges in the arguments (Hydra's grid).

    In a text, quotes keep commas together, and are then no part of it: `prompt='a, b'`. Any other
    text that is no list stays as it stands.

    Raises:
        ConfigError: a value that does not follow Hydra's grammar, or more than `MOST_RUNS` runs.
    """
    config, groups = compose_defaults(root)
    axes = [
        expand_option(argument, declared_type(config, key, groups))
        for argument in arguments
        for key in [argument.partition("=")[0]]
    ]
    check_number(math.prod(map(len, axes)))
    return [list(combination) for combination in itertools.product(*axes)]


def expand_option(argument: str, kind: Any) -> list[str]:
    """Returns an option once for each of its values."""
    key, _, text = argument.partition("=")
    try:
        override: Override = OverridesParser.create().parse_override(argument)
        value: Any = override.value()
        if not override.is_sweep_override():
            quoted = is_text(kind) and isinstance(override._value, QuotedString)
            return [f"{key}={value}"] if quoted else [argument]
        if isinstance(value, Glob | IntervalSweep):
            raise ConfigError(f"{key}={text}: a sweep takes values or a range: {key}=a,b")
        if isinstance(value, RangeSweep):
            check_number(range_length(argument, value))
        elements = list(override.sweep_iterator())
    except HydraException as error:
        if is_text(kind):
            return [argument]
        raise ConfigError(f"{argument}: {one_line(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{key}: its brackets are nested too deeply") from error
    words = WORD.findall(text) if is_text(kind) else []
    if len(words) == len(elements):
        return [f"{key}={word if word[:1] not in QUOTES else word[1:-1]}" for word in words]
    return [f"{key}={element_text(element, kind)}" for element in elements]


def element_text(element: Any, kind: Any) -> str:
    """Returns one value of a list as it would be written alone."""
    if is_text(kind) and isinstance(element, QuotedString | str):
        return element.text if isinstance(element, QuotedString) else element
    return str(Transformer.str(element))


def range_length(argument: str, values: RangeSweep) -> int:
    """Returns the number of values of a range; ConfigError if it never ends."""
    start, stop, step = values.start or 0, values.stop or 0, values.step
    if not step or not all(map(math.isfinite, (start, stop, step))):
        raise ConfigError(f"{argument}: this range has no end")
    if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int):
        return len(range(start, stop, step)) if abs(stop - start) < 2**62 else 2**62
    return max(0, math.ceil((stop - start) / step))


def check_number(num_runs: int) -> None:
    if num_runs > MOST_RUNS:
        raise ConfigError(f"-m makes {num_runs:,} runs of these options; at most {MOST_RUNS:,}")
