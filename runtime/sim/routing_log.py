"""Reads published routing logs: JSON lines, or CSV with a row for each chosen expert.

    {"layer": 3, "experts": [17, 4], "weights": [0.7, 0.3], "request": "a", "position": 0,
     "token": 312, "phase": "prefill"}

Only `layer` and `experts` are required. Without `position`, a request's next token begins where
the layer number does not increase. The columns of a CSV file have the same names, but `expert` and
`weight`; `step` may stand for `position`, and a file of one layer needs it. Both may be compressed
(`.gz`). Shape suffixes: M lines, N tokens, L layers, K top_k.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, TextIO

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from predictors.files import require_plain_file
from predictors.metrics import Phase
from predictors.records import Whole
from runtime.errors import RoutingLogError

UNKNOWN_TOKEN = -1
MAX_LINE = 1 << 20
"""Characters of a line; those of a token and layer take some hundred."""
PHASES = {"prefill": Phase.PREFILL, "decode": Phase.DECODE}


class LogLine(BaseModel):
    """A line of the log; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    layer: Whole = Field(ge=0, lt=2**15)
    experts: list[Annotated[Whole, Field(lt=2**15)]] = Field(min_length=1, max_length=2**15)
    weights: list[Annotated[float, Field(allow_inf_nan=False)]] | None = None
    token: Whole | None = Field(default=None, ge=-1, lt=2**31)
    request: Whole | str | None = None
    position: Whole | None = Field(default=None, ge=0, lt=2**31)
    phase: str | None = None


@dataclass(frozen=True)
class RoutingLog:
    """A log as arrays, requests in the order of their first lines."""

    requests: list[str]
    """Name of each request."""
    request_N: NDArray[np.int64]
    position_N: NDArray[np.int64]
    token_N: NDArray[np.int64]
    """-1 if unknown."""
    phase_N: NDArray[np.int64]
    """Decode if unknown: each token is a separate step."""
    experts_NLK: NDArray[np.int64]
    weights_NLK: NDArray[np.float64] | None
    """None if the log has no weights."""


def read_routing_log(path: Path) -> RoutingLog:
    """Returns the log as arrays.

    Raises:
        RoutingLogError: not a routing log; the message names the line or the token.
    """
    numbers: dict[str, int] = {}
    places: dict[str, tuple[int, int]] = {}
    """Request to (position, layer) of its last line."""
    keys, experts, weights = [], [], []
    for line in _parse(path):
        name = "0" if line.request is None else str(line.request)
        number = numbers.setdefault(name, len(numbers))
        position = line.position
        if position is None:
            before, layer = places.get(name, (0, -1))
            position = before if line.layer > layer else before + 1
        places[name] = position, line.layer
        token = UNKNOWN_TOKEN if line.token is None else line.token
        keys.append((number, position, line.layer, token, PHASES[line.phase or "decode"]))
        experts.append(line.experts)
        weights.append(line.weights)
    if not keys:
        raise RoutingLogError(f"{path} is empty")
    return _arrange(path, list(numbers), np.array(keys, dtype=np.int64), experts, weights)


def _parse(path: Path) -> Iterator[LogLine]:
    if not require_plain_file(path, RoutingLogError).is_file():
        raise RoutingLogError(f"source={path}: no such file")
    top_k = None
    read = _read_csv if ".csv" in path.suffixes else _read_json_lines
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
            for where, line in read(path, _bounded_lines(path, file)):
                top_k = top_k or len(line.experts)
                _check(line, where, top_k)
                yield line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RoutingLogError(f"{path} is not a whole gzip file: {error}") from None
    except csv.Error as error:
        raise RoutingLogError(f"{path} is not CSV: {error}") from None
    except OSError as error:
        raise RoutingLogError(f"{path} cannot be read: {error}") from error


def _bounded_lines(path: Path, file: TextIO) -> Iterator[str]:
    """Yields the lines; a small `.gz` file can unpack to one that fills the memory."""
    while text := file.readline(MAX_LINE + 1):
        if len(text) > MAX_LINE:
            raise RoutingLogError(f"{path} has a line of more than {MAX_LINE:,} characters")
        yield text


def _check(line: LogLine, where: str, top_k: int) -> None:
    if len(line.experts) != top_k:
        raise RoutingLogError(f"{where}: {len(line.experts)} experts, earlier lines have {top_k}")
    if line.weights is not None and len(line.weights) != top_k:
        raise RoutingLogError(f"{where}: {len(line.weights)} weights for {top_k} experts")
    if len(set(line.experts)) < top_k or min(line.experts) < 0:
        raise RoutingLogError(f"{where}: experts {line.experts} are not {top_k} different ids")
    if line.phase not in (None, *PHASES):
        raise RoutingLogError(f"{where}: phase {line.phase!r}, allowed are {', '.join(PHASES)}")


Located = tuple[str, LogLine]
"""Place in the file, for errors, and a line of the log."""


def _read_json_lines(path: Path, lines: Iterable[str]) -> Iterator[Located]:
    for number, text in enumerate(lines, start=1):
        if text.strip():
            where = f"{path}, line {number}"
            yield where, _line(text, where)


COLUMNS = ("layer", "expert", "weight", "request", "position", "step", "token", "phase")
"""Columns of a CSV file: `layer` and `expert` are required, `step` stands for `position`."""


def _read_csv(path: Path, lines: Iterable[str]) -> Iterator[Located]:
    """Yields the chosen experts of a token and layer, which stand in rows one after another."""
    reader = csv.DictReader(lines, skipinitialspace=True)
    names = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = names
    unknown = [name for name in names if name not in COLUMNS]
    if unknown or not {"layer", "expert"}.issubset(names) or {"position", "step"}.issubset(names):
        present = ", ".join(names)[:200] or "none"
        raise RoutingLogError(
            f"{path}, line 1: columns {present}; expected layer, expert, and if known "
            "weight, request, position (or step), token, phase"
        )
    same = [name for name in names if name not in ("expert", "weight")]

    def token_and_layer(row: dict[str, str]) -> tuple[str, ...]:
        return tuple(row[name] for name in same)

    lines_of_log = (
        (where, _join_rows(list(rows), where))
        for _, rows in groupby(_whole_rows(path, reader), key=token_and_layer)
        for where in [f"{path}, line {reader.line_num}"]
    )
    has_places = not {"position", "step", "token", "request"}.isdisjoint(names)
    return lines_of_log if has_places else _require_layers(path, lines_of_log)


def _require_layers(path: Path, lines: Iterator[Located]) -> Iterator[Located]:
    """Yields the lines, where a second layer tells that a token has ended."""
    held: list[Located] = []
    for where, line in lines:
        held.append((where, line))
        if line.layer != held[0][1].layer:
            yield from held
            yield from lines
            return
    if held:
        raise RoutingLogError(
            f"{path} has one layer and neither position nor step, so where a token ends is "
            "unknown; add one of these columns"
        )


def _whole_rows(path: Path, reader: csv.DictReader) -> Iterator[dict[str, str]]:
    for row in reader:
        if None in row or None in row.values():
            raise RoutingLogError(
                f"{path}, line {reader.line_num}: expected {len(reader.fieldnames or ())} columns"
            )
        yield row


def _join_rows(rows: list[dict[str, str]], where: str) -> LogLine:
    first = rows[0]
    position = first.get("position") or first.get("step") or None
    try:
        fields = {
            "layer": float(first["layer"]),
            "experts": [float(row["expert"]) for row in rows],
            "weights": [float(row["weight"]) for row in rows] if first.get("weight") else None,
            "token": float(first["token"]) if first.get("token") else None,
            "request": first.get("request"),
            "position": None if position is None else float(position),
            "phase": first.get("phase") or None,
        }
    except ValueError as error:
        raise RoutingLogError(f"{where}: {error}") from None
    return _validate(fields, where)


def _line(text: str, where: str) -> LogLine:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise RoutingLogError(f"{where} is not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or lists within lists within lists.
        raise RoutingLogError(f"{where} is not a line of a log: {error}") from None
    return _validate(fields, where)


def _validate(fields: Any, where: str) -> LogLine:
    try:
        return LogLine.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the line"
        known = ", ".join(LogLine.model_fields)
        raise RoutingLogError(f"{where}: {key}: {first['msg']}. Keys: {known}") from None


def _arrange(
    path: Path,
    names: list[str],
    keys_M5: NDArray[np.int64],
    experts: list[list[int]],
    weights: list[list[float] | None],
) -> RoutingLog:
    """Arranges lines, given by request, position, layer, token and phase, in any order."""
    layers = np.unique(keys_M5[:, 2])
    order = np.lexsort((keys_M5[:, 2], keys_M5[:, 1], keys_M5[:, 0]))
    keys_M5 = keys_M5[order]
    wrong = _first_uneven(keys_M5, layers)
    if wrong is not None:
        number, position = (int(value) for value in keys_M5[wrong, :2])
        raise RoutingLogError(
            f"{path}: request {names[number]!r}, position {position}: expected each of the "
            f"{len(layers)} layers ({layers[0]}..{layers[-1]}) exactly once"
        )
    keys_NL5 = keys_M5.reshape(-1, len(layers), 5)

    def cube(values: list[Any], dtype: type) -> NDArray:
        return np.array(values, dtype=dtype)[order].reshape(*keys_NL5.shape[:2], -1)

    without = weights.count(None)
    if without not in (0, len(weights)):
        raise RoutingLogError(f"{path}: {without} of {len(weights)} lines have no weights")
    return RoutingLog(
        requests=names,
        request_N=keys_NL5[:, 0, 0],
        position_N=keys_NL5[:, 0, 1],
        token_N=keys_NL5[:, 0, 3],
        phase_N=keys_NL5[:, 0, 4],
        experts_NLK=cube(experts, np.int64),
        weights_NLK=None if without else cube(weights, np.float64),
    )


def _first_uneven(keys_M5: NDArray[np.int64], layers: NDArray[np.int64]) -> int | None:
    """Returns the first line at which a token lacks or repeats a layer; None if there is none."""
    num_tokens = -(-len(keys_M5) // len(layers))
    expected = np.tile(layers, num_tokens)[: len(keys_M5)]
    first = np.arange(len(keys_M5)) // len(layers) * len(layers)
    fits = (keys_M5[:, 2] == expected) & (keys_M5[:, :2] == keys_M5[first, :2]).all(axis=1)
    if fits.all():
        return len(keys_M5) - 1 if len(keys_M5) % len(layers) else None
    return int(first[np.argmin(fits)])
