"""The commands of `moecast collect`: configuration in, a trace and its figures out."""

import re
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from collect.config import CollectConfig, ImportConfig
from collect.errors import TraceError
from collect.traces.layout import TraceSignal
from collect.traces.reader import Trace
from predictors.files import expand_home
from predictors.metrics import Phase

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*:/")


def record(config: CollectConfig) -> dict[str, Any]:
    """Records, completes or opens the trace; returns its figures."""
    # Transformers takes seconds to import; a wrong option is reported before that.
    from collect.record import collect, collect_once
    from collect.recording import recording_settings

    assert config.run_dir is not None
    settings = recording_settings(
        config.data,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
        batch_size=config.batch_size,
        shard_bytes=config.shard_mib << 20,
    )
    signals = [TraceSignal(name) for name in config.signals]
    launched: list[dict[str, int]] = []
    started = time.monotonic()
    record_trace = collect_once if config.output is None else partial(collect, folder=config.output)
    trace = record_trace(
        config.model,
        config.data,
        signals=signals,
        settings=settings,
        budget=config.budget,
        console=Console(stderr=True),
        launcher=config.launcher,
        logs=config.run_dir / "workers",
        on_launched=launched.append,
    )
    summary = summarize(trace, Console(), seconds=time.monotonic() - started)
    return asdict(summary) | {"launched": launched[0] if launched else None}


def import_log(config: ImportConfig) -> dict[str, Any]:
    """Imports the log; returns the figures of the trace."""
    from collect.importer import import_routing

    if config.source is None:
        raise TraceError("source=FILE is missing: moecast collect import FILE")
    source = expand_home(config.source)
    folder = config.output or Path("runs", "traces", "imported", source.stem)
    # A path has one slash where an address has two.
    if ADDRESS.match(str(folder)):
        raise TraceError(f"output={folder}: a log is imported into a folder of this machine")
    started = time.monotonic()
    trace = import_routing(
        source,
        folder,
        model_id=config.model_id,
        revision=config.revision,
        num_experts=config.num_experts,
        hidden_size=config.hidden_size,
        dtype=config.dtype,
        split=config.split,
        origin=config.origin,
    )
    return asdict(summarize(trace, Console(), seconds=time.monotonic() - started))


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """Figures of a trace, for results.json."""

    trace: str
    digest: str
    model: dict[str, Any]
    signals: list[str]
    requests: int
    tokens: int
    prefill_tokens: int
    decode_tokens: int
    held_out_tokens: int
    bytes: int
    seconds: float


def summarize(trace: Trace, console: Console, *, seconds: float) -> TraceSummary:
    """Returns the figures of the trace and prints them on one line."""
    decode_tokens = int(np.count_nonzero(trace.phases == Phase.DECODE))
    summary = TraceSummary(
        trace=trace.where,
        digest=trace.digest,
        model=trace.spec.as_dict(),
        signals=[str(signal) for signal in trace.signals],
        requests=len(trace.request_table),
        tokens=trace.num_tokens,
        prefill_tokens=trace.num_tokens - decode_tokens,
        decode_tokens=decode_tokens,
        held_out_tokens=len(trace.rows("held_out")),
        bytes=sum(file.size for file in trace.manifest.files()),
        seconds=seconds,
    )
    console.print(
        f"{summary.trace}: {summary.tokens:,} tokens of {summary.requests:,} requests "
        f"({decode_tokens:,} generated, {summary.held_out_tokens:,} held out), "
        f"{summary.bytes:,} bytes, digest {summary.digest[:12]}, {seconds:.1f} s",
        highlight=False,
        soft_wrap=True,
    )
    return summary
