"""Runs prompts through a model and writes the trace of what its layers saw and chose."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from collect.config import DataConfig
from collect.launch.config import LauncherConfig
from collect.launch.crews import dispatcher_for
from collect.launch.dispatch import Outcome
from collect.launch.task import Report, Work
from collect.order import Order, default_folder, order_of, settings_of
from collect.plan import Settings, most_rows, require_space
from collect.progress import progress
from collect.traces.layout import ALL_SIGNALS, TraceSignal, row_bytes
from collect.traces.manifest import TracePlan, has_manifest
from collect.traces.reader import Trace
from collect.traces.writer import TraceWriter
from runtime.config import ModelConfig

__all__ = ["collect", "collect_part", "default_folder", "open_parts", "settings_of"]

LOGS = Path("runs", "workers")
"""Of workers, where the caller has no run folder."""


def collect(
    model_config: ModelConfig,
    data_config: DataConfig,
    *,
    folder: Path | str,
    signals: Sequence[TraceSignal] = ALL_SIGNALS,
    settings: Settings | None = None,
    budget: str = "100%",
    console: Console | None = None,
    launcher: LauncherConfig | None = None,
    logs: Path = LOGS,
    heard: Callable[[Outcome], object] = lambda _: None,
) -> Trace:
    """Makes, completes or just opens the trace in `folder`; idempotent.

    Where the trace is there already, no model is loaded.

    Args:
        folder: a folder, or an address such as s3://BUCKET/PATH.
        signals: what to record.
        settings: lengths, sampling, seed; `settings_of(data_config)` unless given.
        budget: memory for experts while recording, in each worker.
        console: where to say what is being done; None is silent.
        launcher: workers that do it; this process unless given.
        logs: folder for what those workers say.
        heard: told how it went, when workers were started.

    Raises:
        TraceError: the folder holds something else, or values do not fit in half precision.
        PromptError: no prompts to be had.
        DiskSpaceError: not enough room, said before anything is recorded.
        CheckpointError: no such model.
        LaunchError: workers could not be had, or could not do some parts.
    """
    order = order_of(model_config, data_config, folder, signals, settings, budget)
    if launcher is None or launcher.is_this_process:
        trace = _recorded(order, console, worker=0, num_workers=1)
        assert trace is not None, "one worker does all the work"
        return trace
    return order.finished() or _launched(order, launcher, console, logs, heard)


def collect_part(
    model_config: ModelConfig,
    data_config: DataConfig,
    *,
    folder: Path | str,
    worker: int,
    num_workers: int,
    signals: Sequence[TraceSignal] = ALL_SIGNALS,
    settings: Settings | None = None,
    budget: str = "100%",
    console: Console | None = None,
) -> Trace | None:
    """`collect` as one of several workers that were started by hand.

    None when others have units still to write.
    """
    order = order_of(model_config, data_config, folder, signals, settings, budget)
    return _recorded(order, console, worker=worker, num_workers=num_workers)


def _recorded(
    order: Order, console: Console | None, *, worker: int, num_workers: int
) -> Trace | None:
    """In this process; the last worker to end finishes the trace."""
    trace = order.finished()
    if trace is not None:
        return trace
    job = order.load()
    with job.model.moecast:
        job.check_model()
        rows = [most_rows(unit, order.settings) for unit in job.work]
        writer, missing = begun(order.where, job.plan, rows)
        mine = [unit for unit in missing if unit % num_workers == worker]
        total = sum(len(job.work[unit]) for unit in mine)
        announce(console, order.where, job.plan, rows, mine, num_prompts=total)
        with progress(console, "recorded", "prompts", total=total) as advance:
            for unit in mine:
                writer.write(unit, *job.record_unit(unit, advance))
    return None if writer.missing() else writer.finish()


def _launched(
    order: Order,
    launcher: LauncherConfig,
    console: Console | None,
    logs: Path,
    heard: Callable[[Outcome], object],
) -> Trace:
    """By workers, each with the model loaded; this process loads none."""
    order_json = {"order": order.as_json()}
    tell = None if console is None else console.print
    with dispatcher_for(
        launcher, "collect.record:open_parts", order_json, folder=logs, tell=tell
    ) as dispatcher:
        about = dispatcher.begin()
        plan = TracePlan.model_validate(about["plan"])
        prompts = about["prompts"]
        writer, missing = begun(order.where, plan, about["rows"])
        total = sum(prompts[unit] for unit in missing)
        announce(console, order.where, plan, about["rows"], missing, num_prompts=total)
        with progress(console, "recorded", "prompts", total=total) as advance:
            outcome = dispatcher.run(
                [plan.units[unit] for unit in missing],
                advance=advance,
                amounts=[prompts[unit] for unit in missing],
            )
    heard(outcome)
    outcome.require_all("parts of the trace")
    return writer.finish()


def open_parts(order: dict[str, Any]) -> Work:
    """A worker's side: the model is loaded once, each unit is named by its digest in the plan."""
    asked = Order.from_json(order)
    # Open until the worker's end: the process goes, and with it the model.
    job = asked.load()
    job.check_model()
    numbers = {digest: unit for unit, digest in enumerate(job.plan.units)}

    def do(digest: str, report: Report) -> None:
        writer = TraceWriter(asked.where, job.plan, joins=True)
        unit = numbers[digest]
        if not writer.has(unit):
            writer.write(unit, *job.record_unit(unit, report))

    about = {
        "plan": job.plan.model_dump(mode="json"),
        "prompts": [len(unit) for unit in job.work],
        "rows": [most_rows(unit, job.settings) for unit in job.work],
    }
    return Work(do, about)


def begun(where: str, plan: TracePlan, rows: Sequence[int]) -> tuple[TraceWriter, list[int]]:
    """The trace's writer and the units that are missing; DiskSpaceError when they have no room."""
    bytes_per_row = row_bytes(plan.spec, plan.signals)
    if not has_manifest(where):
        require_space(where, bytes_per_row * sum(rows))
    writer = TraceWriter(where, plan)
    missing = writer.missing()
    require_space(where, bytes_per_row * sum(rows[unit] for unit in missing))
    return writer, missing


def announce(
    console: Console | None,
    where: str,
    plan: TracePlan,
    rows: Sequence[int],
    mine: Sequence[int],
    *,
    num_prompts: int,
) -> None:
    """How much is to be done, and the bytes that it will take."""
    if console is not None:
        bytes_per_row = row_bytes(plan.spec, plan.signals)
        most = bytes_per_row * sum(rows[unit] for unit in mine)
        console.print(
            f"{where}: {num_prompts} prompts to record in {len(mine)} of {len(plan.units)} "
            f"parts, at most {most:,} bytes ({bytes_per_row:,} a token)",
            highlight=False,
            soft_wrap=True,
        )
