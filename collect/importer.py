"""Imports a published routing log, a JSON line for each token and layer, as a trace.

    {"layer": 3, "experts": [17, 4], "weights": [0.7, 0.3], "request": "a", "position": 0,
     "token": 312, "phase": "prefill"}

Only `layer` and `experts` are required. Without `position`, a request's next token begins where
the layer number does not increase. Shape suffixes: M lines, N tokens, L layers, K top_k.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from collect.errors import TraceError
from collect.plan import require_space
from collect.traces.layout import TraceSignal, choose_split, prompt_digest, row_bytes
from collect.traces.manifest import TraceModel, TracePlan, TraceRequest, digest_of
from collect.traces.reader import Trace
from collect.traces.writer import TraceWriter, column_arrays
from predictors.metrics import Phase

UNKNOWN_TOKEN = -1
PHASES = {"prefill": Phase.PREFILL, "decode": Phase.DECODE}


class LogLine(BaseModel):
    """A line of the log; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    layer: int = Field(ge=0)
    experts: list[int] = Field(min_length=1)
    weights: list[float] | None = None
    token: int | None = None
    request: int | str = 0
    position: int | None = Field(default=None, ge=0)
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


@dataclass
class _LogLines:
    """The lines read so far, and the position of each request."""

    numbers: dict[str, int] = field(default_factory=dict)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Request to (position, layer) of its last line."""
    keys: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    experts: list[list[int]] = field(default_factory=list)
    weights: list[list[float] | None] = field(default_factory=list)

    def add(self, line: LogLine) -> None:
        name = str(line.request)
        number = self.numbers.setdefault(name, len(self.numbers))
        position = line.position
        if position is None:
            before, layer = self.places.get(name, (0, -1))
            position = before if line.layer > layer else before + 1
        self.places[name] = position, line.layer
        token = UNKNOWN_TOKEN if line.token is None else line.token
        phase = PHASES[line.phase or "decode"]
        self.keys.append((number, position, line.layer, token, phase))
        self.experts.append(line.experts)
        self.weights.append(line.weights)


def read_routing_log(path: Path) -> RoutingLog:
    """Returns the log as arrays.

    Raises:
        TraceError: not a routing log; the message names the line or the token.
    """
    lines = _LogLines()
    for line in _parsed(path):
        lines.add(line)
    if not lines.keys:
        raise TraceError(f"{path} is empty")
    return _arranged(path, lines)


def _parsed(path: Path) -> Iterator[LogLine]:
    if not path.is_file():
        raise TraceError(f"source={path}: no such file")
    top_k = None
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            where = f"{path}, line {number}"
            line = _line(text, where)
            top_k = top_k or len(line.experts)
            if len(line.experts) != top_k:
                raise TraceError(
                    f"{where}: {len(line.experts)} experts, earlier lines have {top_k}"
                )
            if line.weights is not None and len(line.weights) != top_k:
                raise TraceError(f"{where}: {len(line.weights)} weights for {top_k} experts")
            if len(set(line.experts)) < top_k or min(line.experts) < 0:
                raise TraceError(f"{where}: experts {line.experts} are not {top_k} different ids")
            if line.phase not in (None, *PHASES):
                raise TraceError(f"{where}: phase {line.phase!r}, allowed are {', '.join(PHASES)}")
            yield line


def _line(text: str, where: str) -> LogLine:
    try:
        return LogLine.model_validate(json.loads(text))
    except json.JSONDecodeError as error:
        raise TraceError(f"{where} is not JSON: {error.msg}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the line"
        known = ", ".join(LogLine.model_fields)
        raise TraceError(f"{where}: {key}: {first['msg']}. Keys: {known}") from None


def _arranged(path: Path, lines: _LogLines) -> RoutingLog:
    keys_M5 = np.array(lines.keys, dtype=np.int64)
    layers = np.unique(keys_M5[:, 2])
    order = np.lexsort((keys_M5[:, 2], keys_M5[:, 1], keys_M5[:, 0]))
    keys_M5 = keys_M5[order]
    names = list(lines.numbers)
    wrong = _first_uneven(keys_M5, layers)
    if wrong is not None:
        number, position = (int(value) for value in keys_M5[wrong, :2])
        raise TraceError(
            f"{path}: request {names[number]!r}, position {position}: expected each of the "
            f"{len(layers)} layers ({layers[0]}..{layers[-1]}) exactly once"
        )
    keys_NL5 = keys_M5.reshape(-1, len(layers), 5)

    def cube(values: list[Any], dtype: type) -> NDArray:
        return np.array(values, dtype=dtype)[order].reshape(*keys_NL5.shape[:2], -1)

    without = lines.weights.count(None)
    if without not in (0, len(lines.weights)):
        raise TraceError(f"{path}: {without} of {len(lines.weights)} lines have no weights")
    return RoutingLog(
        requests=names,
        request_N=keys_NL5[:, 0, 0],
        position_N=keys_NL5[:, 0, 1],
        token_N=keys_NL5[:, 0, 3],
        phase_N=keys_NL5[:, 0, 4],
        experts_NLK=cube(lines.experts, np.int64),
        weights_NLK=None if without else cube(lines.weights, np.float64),
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


IMPORT_VERSION = 1
"""Part of the plan: increased when the same log gives other rows."""

MAX_EXPERTS = 2**15 - 1


def import_routing(
    source: Path,
    folder: Path,
    *,
    model_id: str = "unknown",
    revision: str = "unknown",
    num_experts: int | None = None,
    hidden_size: int = 0,
    dtype: str = "unknown",
) -> Trace:
    """Reads the log at `source` and writes, completes or opens the trace in `folder`.

    Layers are numbered 0.. from the lowest. The split is by request; a log without requests is one
    request.

    Raises:
        TraceError: not a routing log, or the folder holds something else.
        DiskSpaceError: not enough free space.
    """
    log = read_routing_log(source)
    highest = int(log.experts_NLK.max())
    num_experts = num_experts or highest + 1
    if highest >= num_experts or num_experts > MAX_EXPERTS:
        raise TraceError(
            f"{source}: expert {highest} with num_experts={num_experts}: ids run from 0 to "
            f"num_experts - 1, of at most {MAX_EXPERTS:,} experts"
        )
    _, num_layers, top_k = log.experts_NLK.shape
    model = TraceModel(
        model_id=model_id,
        revision=revision,
        config_hash="unknown",
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        dtype=dtype,
    )
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    known = log.weights_NLK is not None
    signals = (TraceSignal.EXPERTS, TraceSignal.WEIGHTS) if known else (TraceSignal.EXPERTS,)
    settings: dict[str, Any] = {"import_version": IMPORT_VERSION, "source_sha256": digest}
    plan = TracePlan(
        source="imported",
        model=model,
        signals=signals,
        dataset=source.name,
        prompts_digest=digest_of(log.requests),
        settings=settings,
        units=(digest_of([settings, model.model_dump(), signals]),),
    )
    require_space(folder, len(log.token_N) * row_bytes(plan.spec, signals))
    writer = TraceWriter(folder, plan)
    for unit in writer.missing():
        writer.write(
            unit, _arrays(log, signals), _requests(log, dataset=source.name, source=digest)
        )
    return writer.finish()


def _arrays(log: RoutingLog, signals: tuple[TraceSignal, ...]) -> dict[str, np.ndarray]:
    arrays = {
        "request": log.request_N,
        "position": log.position_N,
        "token": log.token_N,
        "phase": log.phase_N,
    }
    for layer in range(log.experts_NLK.shape[1]):
        for signal in signals:
            cube = log.experts_NLK if signal is TraceSignal.EXPERTS else log.weights_NLK
            assert cube is not None, "the signals of a log without weights do not include them"
            arrays |= column_arrays(signal, layer, cube[:, layer])
    return arrays


def _requests(log: RoutingLog, *, dataset: str, source: str) -> list[TraceRequest]:
    """Returns requests; prompts are unknown, so digests are those of the names in the log."""
    count = len(log.requests)
    prefill = np.bincount(log.request_N[log.phase_N == Phase.PREFILL], minlength=count)
    decode = np.bincount(log.request_N[log.phase_N == Phase.DECODE], minlength=count)
    digests = [prompt_digest(f"{source}/{name}") for name in log.requests]
    return [
        TraceRequest(
            index=index,
            digest=digest,
            dataset=dataset,
            split=choose_split(digest),
            prompt_tokens=int(prefill[index]),
            generated_tokens=int(decode[index]),
        )
        for index, digest in enumerate(digests)
    ]
