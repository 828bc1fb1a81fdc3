"""`python -m benchmarks control-plane`: what moecast adds to a step besides moving bytes.

Plain Transformers and the systems decode the same random tokens in turns, in one process for each
shape and budget. Models and predictors are random and untrained: what is prefetched is mostly
wasted. That does not matter, as experts are read from the page cache and only the costs of control
are compared. Prefetching stays on in systems that would turn it off.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.control_plane.config import ControlPlaneConfig
from benchmarks.control_plane.measure import ControlPlaneRow, ControlPlaneTask
from benchmarks.control_plane.model import SHAPES, RandomShape, write_model, write_predictors
from benchmarks.reports import describe_machine, print_line, write_report
from predictors.errors import MoecastError
from runtime.config import SystemConfig
from runtime.presets import load_system
from runtime.tools.child_process import ChildFailure, run_in_child

LIMIT_SECONDS = 600.0
"""A shape at a budget that takes longer is ended; the others go on."""


@dataclass(frozen=True, kw_only=True)
class ControlPlaneCell:
    """One shape at one budget."""

    shape: RandomShape
    budget: str
    rows: list[ControlPlaneRow]
    """Plain Transformers first; empty after a failure."""
    failed: str | None = None


def run_control_plane(config: ControlPlaneConfig) -> None:
    """Measure every shape at every budget; the results are written after each.

    Raises:
        MoecastError: nothing could be measured; earlier results are left as they are.
    """
    machine = describe_machine(config.threads)
    systems = [load_system(name) for name in config.system]
    cells: list[ControlPlaneCell] = []
    for name in config.shape:
        with tempfile.TemporaryDirectory(prefix="control-plane-") as folder:
            for cell in measure_shape(config, systems, SHAPES[name], Path(folder)):
                cells.append(cell)
                if any(cell.rows for cell in cells):
                    write_report(config, machine=machine, cells=cells)
    if not any(cell.rows for cell in cells):
        raise MoecastError(f"nothing was measured: {cells[0].failed if cells else 'no budget'}")


def measure_shape(
    config: ControlPlaneConfig, systems: Sequence[SystemConfig], shape: RandomShape, folder: Path
) -> Iterator[ControlPlaneCell]:
    """Yield the shape at each budget; a budget that fails says why."""
    print_line(f"{shape.name}: writing a random model and predictors")
    model = write_model(shape, folder / "model", seed=config.seed)
    write_predictors(model, folder / "entries", seed=config.seed)
    for number, budget in enumerate(config.budget):
        task = ControlPlaneTask(
            model=model,
            entries=folder / "entries",
            budget=budget,
            system=systems,
            turns=config.repetitions,
            steps=config.steps,
            threads=config.threads,
            seed=config.seed,
        )
        result = run_in_child(
            "benchmarks.control_plane.measure:run_control_plane_task",
            task,
            folder / f"child-{number}",
            limit_seconds=LIMIT_SECONDS,
        )
        if isinstance(result, ChildFailure):
            print_line(f"{shape.name}, {budget}: {result.reason}")
            yield ControlPlaneCell(shape=shape, budget=budget, rows=[], failed=result.reason)
            continue
        rows = TypeAdapter(list[ControlPlaneRow]).validate_python(result)
        for row in rows:
            print_line(
                f"{shape.name}, {budget}, {row.system}: {1e3 * row.tpot_seconds:.1f} ms a token, "
                f"{row.over_plain:.2f} of plain, {row.calls:.0f} calls a layer"
            )
        yield ControlPlaneCell(shape=shape, budget=budget, rows=rows)
