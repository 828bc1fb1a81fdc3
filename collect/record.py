"""Runs prompts through a model and writes a trace of its hidden states and routing."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from collect.config import DataConfig
from collect.launch.config import LauncherConfig
from collect.launch.pool import WorkerPool
from collect.launch.worker import DoUnit
from collect.plan import RecordingSettings, max_rows, require_space
from collect.recording import RecordingJob, recording_settings
from collect.traces.layout import ALL_SIGNALS, TraceSignal, row_bytes
from collect.traces.manifest import TracePlan, has_manifest
from collect.traces.reader import Trace
from collect.traces.writer import TraceWriter
from runtime.commands.progress import progress
from runtime.config import ModelConfig

LOGS = Path("runs", "workers")
"""The workers' logs, where there is no run folder."""
PLAN = "plan"
"""A unit that returns the plan, which depends on the loaded model."""


def collect(
    model: ModelConfig,
    data: DataConfig,
    *,
    folder: Path | str,
    signals: Sequence[TraceSignal] = ALL_SIGNALS,
    settings: RecordingSettings | None = None,
    budget: str = "auto",
    console: Console | None = None,
    launcher: LauncherConfig | None = None,
    logs: Path = LOGS,
    on_launched: Callable[[dict[str, int]], object] = lambda _: None,
) -> Trace:
    """Makes, completes or just opens the trace in `folder`; idempotent.

    No model is loaded where the trace is complete.

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
        DiskSpaceError: not enough space, reported before anything is recorded.
        CheckpointError: no such model.
        LaunchError: workers could not be started, or units failed.
    """
    chosen = tuple(signal for signal in ALL_SIGNALS if signal in signals)
    settings = settings or recording_settings(data)
    job = RecordingJob(model, data, str(folder), chosen, settings, budget)
    trace = job.open_finished()
    if trace is not None:
        return trace
    if launcher is None or launcher.is_in_process:
        return _record_here(job, console)
    arguments = {"job": job.to_json()}
    say = (lambda _: None) if console is None else console.print
    with WorkerPool(
        launcher, "collect.record:open_recording", arguments, logs=logs, say=say
    ) as pool:
        trace = record_with(pool, job, console)
        on_launched(pool.as_dict())
    return trace


def _record_here(job: RecordingJob, console: Console | None) -> Trace:
    recorder = job.load()
    with recorder.model.moecast:
        prompts = [len(unit) for unit in recorder.work]
        rows = [max_rows(unit, job.settings) for unit in recorder.work]
        writer, missing = _begin(job.where, recorder.plan, rows, prompts, console)
        total = sum(prompts[unit] for unit in missing)
        with progress(console, "recording", total=total) as advance:
            for unit in missing:
                writer.write(unit, *recorder.record(unit, advance))
    return writer.finish()


def record_with(pool: WorkerPool, job: RecordingJob, console: Console | None = None) -> Trace:
    """Records with workers of `open_recording`; this process loads no model.

    Raises:
        LaunchError: units failed; the others are kept.
    """
    made = pool.run([PLAN])[PLAN]
    plan, prompts = TracePlan.model_validate(made["plan"]), made["prompts"]
    writer, missing = _begin(job.where, plan, made["rows"], prompts, console)
    sizes = {plan.units[unit]: prompts[unit] for unit in missing}
    with progress(console, "recording", total=sum(sizes.values())) as advance:
        pool.run(list(sizes), advance=lambda digest: advance(sizes[digest]))
    return writer.finish()


def open_recording(job: dict[str, Any]) -> DoUnit:
    """Entry point of a worker: loads the model once. A unit is named by its digest in the plan."""
    recording = RecordingJob.from_json(job)
    # Open until the worker ends: the process goes, and with it the model.
    recorder = recording.load()
    numbers = {digest: unit for unit, digest in enumerate(recorder.plan.units)}

    def do(name: str) -> Any:
        if name == PLAN:
            return {
                "plan": recorder.plan.model_dump(mode="json"),
                "prompts": [len(unit) for unit in recorder.work],
                "rows": [max_rows(unit, recording.settings) for unit in recorder.work],
            }
        writer = TraceWriter(recording.where, recorder.plan, joins=True)
        if not writer.has(numbers[name]):
            writer.write(numbers[name], *recorder.record(numbers[name]))
        return None

    return do


def _begin(
    where: str,
    plan: TracePlan,
    rows: Sequence[int],
    prompts: Sequence[int],
    console: Console | None,
) -> tuple[TraceWriter, list[int]]:
    """Returns the trace's writer and the missing units, and announces their size.

    `rows` are the most rows of each unit, `prompts` its number of prompts.

    Raises:
        DiskSpaceError: they do not fit on the disk.
    """
    bytes_per_row = row_bytes(plan.spec, plan.signals)
    if not has_manifest(where):
        require_space(where, bytes_per_row * sum(rows))
    writer = TraceWriter(where, plan)
    missing = writer.missing()
    most_bytes = bytes_per_row * sum(rows[unit] for unit in missing)
    require_space(where, most_bytes)
    if console is not None:
        console.print(
            f"{where}: {sum(prompts[unit] for unit in missing)} prompts to record in "
            f"{len(missing)} of {len(plan.units)} parts, at most {most_bytes:,} bytes "
            f"({bytes_per_row:,} per token)",
            highlight=False,
            soft_wrap=True,
        )
    return writer, missing
