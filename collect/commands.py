"""The commands of `moecast collect`: configuration in, a trace and its figures out."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from collect.config import CollectConfig, ImportConfig
from collect.errors import TraceError
from collect.traces.reader import Trace
from predictors.files import expand_home
from predictors.metrics import Phase
from runtime.commands.progress import print_line


def record(config: CollectConfig) -> dict[str, Any]:
    """Records, completes or opens the trace; returns its figures."""
    # Transformers takes seconds to import; a wrong option is reported before that.
    from collect.plan import recording_settings
    from collect.record import LOGS, collect

    settings = recording_settings(
        config.data,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
        batch_size=config.batch_size,
        shard_bytes=config.shard_mib << 20,
    )
    launched: list[dict[str, int]] = []
    started = time.monotonic()
    trace = collect(
        config.model,
        config.data,
        folder=config.output,
        signals=config.signals,
        settings=settings,
        budget=config.budget,
        console=Console(stderr=True),
        launcher=config.launcher,
        logs=LOGS if config.run_dir is None else config.run_dir / "workers",
        on_launched=launched.append,
    )
    summary = summarize(trace, seconds=time.monotonic() - started)
    return summary | {"launched": launched[0] if launched else None}


def import_log(config: ImportConfig) -> dict[str, Any]:
    """Imports the log; returns the figures of the trace."""
    from collect.importer import import_routing

    if config.source is None:
        raise TraceError("source=FILE is missing: moecast collect import FILE")
    source = expand_home(config.source)
    where = config.output or Path("runs", "traces", "imported", source.stem)
    started = time.monotonic()
    trace = import_routing(source, where, config)
    return summarize(trace, seconds=time.monotonic() - started)


def summarize(trace: Trace, *, seconds: float) -> dict[str, Any]:
    """Returns the figures of the trace, for results.json, and prints them on one line."""
    num_decode = int(np.count_nonzero(trace.phases == Phase.DECODE))
    num_held_out = len(trace.rows("held_out"))
    num_bytes = sum(file.size for file in trace.manifest.files())
    print_line(
        f"{trace.where}: {trace.num_tokens:,} tokens of {len(trace.request_table):,} requests "
        f"({num_decode:,} generated, {num_held_out:,} held out), "
        f"{num_bytes:,} bytes, digest {trace.digest[:12]}, {seconds:.1f} s"
    )
    return {
        "trace": trace.where,
        "digest": trace.digest,
        "model": trace.spec.as_dict(),
        "signals": [str(signal) for signal in trace.signals],
        "requests": len(trace.request_table),
        "tokens": trace.num_tokens,
        "prefill_tokens": trace.num_tokens - num_decode,
        "decode_tokens": num_decode,
        "held_out_tokens": num_held_out,
        "bytes": num_bytes,
        "seconds": seconds,
    }
