"""Imports a published routing log as a trace. Shape suffixes: N tokens, L layers, K top_k."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from collect.config import ImportConfig, ImportSplit
from collect.errors import TraceError
from collect.plan import require_space
from collect.traces.layout import (
    Split,
    TraceSignal,
    choose_split,
    column_name,
    prompt_digest,
    row_bytes,
)
from collect.traces.manifest import TraceModel, TracePlan, TraceRequest, hash_value
from collect.traces.reader import Trace
from collect.traces.writer import TraceWriter, to_half
from predictors.metrics import Phase
from predictors.records import explain_validation_error
from runtime.sim.routing_log import RoutingLog, read_routing_log

IMPORT_VERSION = 2
"""Part of the plan: increased when the same log gives other rows."""

SPLITS = {ImportSplit.HELD_OUT: Split.HELD_OUT, ImportSplit.TRAIN: Split.TRAIN}

MAX_EXPERTS = 2**15 - 1
MAX_POSITION = 2**31 - 1


def import_routing(source: Path, where: Path | str, config: ImportConfig) -> Trace:
    """Reads the log at `source` and writes, completes or opens the trace in `where`.

    `config` says what the log does not: its model, its split, its origin. Layers are numbered 0..
    from the lowest. A log without requests is one request.

    Raises:
        RoutingLogError: not a routing log.
        TraceError: impossible ids, or the folder holds something else.
        DiskFullError: not enough free space.
    """
    log = read_routing_log(source)
    highest = int(log.experts_NLK.max())
    num_experts = config.num_experts or highest + 1
    if highest >= num_experts or num_experts > MAX_EXPERTS:
        raise TraceError(
            f"{source}: expert {highest} with num_experts={num_experts}: ids run from 0 to "
            f"num_experts - 1, of at most {MAX_EXPERTS:,} experts"
        )
    _check_phases(log, source)
    _, num_layers, top_k = log.experts_NLK.shape
    try:
        model = TraceModel(
            model_id=config.model_id,
            revision=config.revision,
            config_hash="unknown",
            num_layers=num_layers,
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=config.hidden_size,
            dtype=config.dtype,
        )
    except ValidationError as error:
        raise TraceError(f"{source}: {explain_validation_error(error)}") from error
    # A file's name may have bytes that are not UTF-8; texts of a trace have none.
    dataset = os.fsencode(source.name).decode(errors="replace")
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    cubes: dict[TraceSignal, NDArray] = {TraceSignal.EXPERTS: log.experts_NLK}
    if log.weights_NLK is not None:
        cubes[TraceSignal.WEIGHTS] = log.weights_NLK
    signals = tuple(cubes)
    settings: dict[str, Any] = {
        "import_version": IMPORT_VERSION,
        "source_sha256": digest,
        "split": config.split.value,
        "origin": config.origin,
    }
    plan = TracePlan(
        source="imported",
        model=model,
        signals=signals,
        dataset=dataset,
        prompts_digest=hash_value(log.requests),
        settings=settings,
        units=(hash_value([settings, model.model_dump(), signals]),),
    )
    require_space(where, len(log.token_N) * row_bytes(plan.spec, signals))
    writer = TraceWriter(where, plan)
    for unit in writer.missing():
        requests = _requests(log, dataset=dataset, source=digest, split=config.split)
        writer.write(unit, _arrays(log, cubes), requests)
    return writer.finish()


def _check_phases(log: RoutingLog, source: Path) -> None:
    """Raises TraceError for a request whose prompt goes on after a generated token.

    Also for positions that were counted beyond what a trace can hold.
    """
    if log.position_N.max() > MAX_POSITION:
        raise TraceError(f"{source}: position {log.position_N.max()} is above {MAX_POSITION:,}")
    follows_N = (np.diff(log.request_N) == 0) & (np.diff(log.phase_N) < 0)
    if follows_N.any():
        row = int(np.argmax(follows_N)) + 1
        raise TraceError(
            f"{source}: request {log.requests[log.request_N[row]]!r}, position "
            f"{log.position_N[row]}: phase prefill after decode"
        )


def _arrays(log: RoutingLog, cubes: Mapping[TraceSignal, NDArray]) -> dict[str, NDArray]:
    arrays: dict[str, NDArray] = {
        "request": log.request_N,
        "position": log.position_N,
        "token": log.token_N,
        "phase": log.phase_N,
    }
    for signal, cube_NLK in cubes.items():
        for layer in range(cube_NLK.shape[1]):
            arrays[column_name(signal, layer)] = to_half(cube_NLK[:, layer], signal, layer)
    return arrays


def _requests(
    log: RoutingLog, *, dataset: str, source: str, split: ImportSplit
) -> list[TraceRequest]:
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
            split=SPLITS.get(split) or choose_split(digest),
            prompt_tokens=int(prefill[index]),
            generated_tokens=int(decode[index]),
        )
        for index, digest in enumerate(digests)
    ]
