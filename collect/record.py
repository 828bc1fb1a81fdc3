"""Runs prompts through a model and writes a trace of its hidden states and routing."""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from collect.config import DataConfig, LauncherConfig
from collect.errors import TraceError
from collect.launch.pool import start_pool
from collect.launch.processes import DoUnit, WorkerPool, share_gpus
from collect.plan import (
    RecordingJob,
    RecordingSettings,
    max_rows,
    recording_settings,
    require_space,
)
from collect.recorder import UnitRecorder
from collect.traces.layout import ALL_SIGNALS, row_bytes
from collect.traces.manifest import MANIFEST, TracePlan, has_manifest, read_manifest
from collect.traces.reader import Trace
from collect.traces.writer import TraceWriter
from runtime.commands.progress import print_line, progress
from runtime.config import ModelConfig

log = logging.getLogger(__name__)

LOGS = Path("runs", "workers")
"""The workers' logs, where there is no run folder."""
PLAN = "plan"
"""A unit that returns the plan, which depends on the loaded model."""


def collect(
    model: ModelConfig,
    data: DataConfig,
    *,
    folder: Path | str | None = None,
    signals: Collection[str] = ALL_SIGNALS,
    settings: RecordingSettings | None = None,
    budget: str = "auto",
    console: Console | None = None,
    launcher: LauncherConfig | None = None,
    logs: Path = LOGS,
    on_launched: Callable[[dict[str, int]], object] = lambda _: None,
) -> Trace:
    """Makes, completes or just opens the trace of these prompts; idempotent.

    No model is loaded where the trace is complete. Without a folder, the trace is in runs/traces: a
    finished one with the same prompts, lengths and sampling is reused, whatever its batch size and
    further signals, and an unfinished one with all signals is completed where fewer are needed.

    Args:
        model: the model to run.
        data: the prompts.
        folder: a folder, or an address such as s3://BUCKET/PATH.
        signals: what to record.
        settings: lengths, sampling, seed; `recording_settings(data)` unless given.
        budget: memory for experts while recording, in each worker.
        console: for progress; silent unless given.
        launcher: workers; this process unless given.
        logs: folder for the workers' output.
        on_launched: called with the number of units and retries, if workers were started.

    Raises:
        TraceError: the folder holds something else, or values do not fit in half precision.
        PromptError: the prompts cannot be read.
        DiskFullError: not enough space, reported before anything is recorded.
        CheckpointError: no such model.
        LaunchError: workers could not be started, or units failed.
    """
    say = (lambda _: None) if console is None else partial(print_line, console=console)
    settings = settings or recording_settings(data)
    chosen = tuple(signal for signal in ALL_SIGNALS if signal in signals)
    job = RecordingJob(model, data, str(folder), chosen, settings, budget)
    if folder is None:
        own, whole = (job.default_folder(of) for of in (chosen, ALL_SIGNALS))
        same = find_same_trace(replace(job, where=str(own)), own.parent)
        if same is not None:
            say(f"{same}: reused, these prompts are recorded already")
            return Trace.open(same)
        if has_manifest(whole):
            own, chosen = whole, ALL_SIGNALS
        job = replace(job, where=str(own), signals=chosen)
    trace = job.open_finished()
    if trace is not None:
        return trace
    if launcher is None or launcher.is_in_process:
        if launcher is not None:
            share_gpus(launcher)  # raises, if there are not as many
        return _record_here(job, console)
    with start_pool(
        launcher,
        "collect.record:open_recording",
        {"job": job.to_json()},
        logs=logs,
        name=f"collect-{model.name}",
        say=say,
    ) as pool:
        trace = record_with(pool, job, console)
        on_launched(pool.counts)
    return trace


def find_same_trace(job: RecordingJob, folder: Path) -> Path | None:
    """Return the finished trace in a subfolder of `folder` that contains all that `job` records.

    It may have more signals, batches of another size and another name. The folder of the job itself
    comes first.
    """
    paths = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    for path in sorted(paths, key=lambda path: path != Path(job.where)):
        try:
            manifest = read_manifest(path)
        except TraceError as error:
            log.warning("%s", error)
            continue
        if job.is_in(manifest):
            return path
    return None


def _record_here(job: RecordingJob, console: Console | None) -> Trace:
    recorder = UnitRecorder.load(job)
    with recorder.model.moecast:
        writer, rows = _begin(job, recorder.plan, console)
        with progress(console, "recording", total=sum(rows.values()), unit="tokens") as advance:
            for unit in rows:
                writer.write(unit, *recorder.record(unit, advance))
    return writer.finish()


def record_with(pool: WorkerPool, job: RecordingJob, console: Console | None = None) -> Trace:
    """Records with workers of `open_recording`; this process loads no model.

    Raises:
        LaunchError: units failed; the others are kept.
    """
    plan = TracePlan.model_validate(pool.run([PLAN])[PLAN])
    writer, rows = _begin(job, plan, console)
    sizes = {plan.units[unit]: num_rows for unit, num_rows in rows.items()}
    with progress(console, "recording", total=sum(sizes.values()), unit="tokens") as advance:
        pool.run(list(sizes), advance=lambda digest: advance(sizes[digest]))
    return writer.finish()


def open_recording(job: dict[str, Any]) -> DoUnit:
    """Entry point of a worker: loads the model once. A unit is named by its digest in the plan."""
    recording = RecordingJob.from_json(job)
    # Open until the worker ends: the process goes, and with it the model.
    recorder = UnitRecorder.load(recording)
    numbers = {digest: unit for unit, digest in enumerate(recorder.plan.units)}

    def do(name: str) -> Any:
        if name == PLAN:
            return recorder.plan.model_dump(mode="json")
        writer = TraceWriter(recording.where, recorder.plan, joins=True)
        if not writer.has(numbers[name]):
            writer.write(numbers[name], *recorder.record(numbers[name]))
        return None

    return do


def _begin(
    job: RecordingJob, plan: TracePlan, console: Console | None
) -> tuple[TraceWriter, dict[int, int]]:
    """Returns the trace's writer and the most rows of each missing unit; announces their size.

    Raises:
        DiskFullError: they do not fit on the disk.
    """
    work = job.plan(plan.spec)[1]
    bytes_per_row = row_bytes(plan.spec, plan.signals)
    if not has_manifest(job.where):
        require_space(job.where, bytes_per_row * sum(max_rows(unit, job.settings) for unit in work))
    writer = TraceWriter(job.where, plan)
    rows = {unit: max_rows(work[unit], job.settings) for unit in writer.missing()}
    num_bytes = bytes_per_row * sum(rows.values())
    require_space(job.where, num_bytes)
    if console is not None:
        print_line(
            f"{job.where}: {sum(len(work[unit]) for unit in rows)} prompts to record in "
            f"{len(rows)} of {len(work)} parts, at most {sum(rows.values()):,} tokens and "
            f"{num_bytes:,} bytes ({bytes_per_row:,} per token)",
            console,
        )
    return writer, rows
