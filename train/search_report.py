"""The end of a search (`moecast train -m`): a table, a picture, and the best run's entries."""

import csv
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from predictors.run_folder import ENTRIES
from predictors.table import Table
from runtime.tools.report.figures import LIGHT, render_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 10
"""Trials in the printed table; sweep.csv has all."""


def report(folder: Path, trials: Sequence[Mapping[str, Any]], objective: str) -> None:
    """Print the best trials, write sweep.csv and sweep.png, and copy the best entries.

    Args:
        folder: Folder of the search; trial N is the run in `folder/N`.
        trials: `number`, `options` and `objective` of each, best first.
        objective: Name of what was maximised.
    """
    names = list(trials[0]["options"])
    rows: list[list[Any]] = [
        [trial["number"], *(trial["options"][name] for name in names), trial["objective"]]
        for trial in trials
    ]
    with (folder / "sweep.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["trial", *names, objective], *rows])
    Table.of(
        ["trial", *names, objective],
        [[format_value(value) for value in row] for row in rows[:SHOWN]],
        elsewhere=f"{folder / 'sweep.csv'} has them",
    ).print(Console())
    png = render_figure(
        lambda figure: draw(figure, trials, objective),
        LIGHT,
        inches=(3.0 * (1 + len(names)), 3.2),
        kind="png",
        title=f"{objective} of {len(trials)} trials",
    )
    (folder / "sweep.png").write_bytes(png)
    best = folder / str(trials[0]["number"])
    if (best / ENTRIES).is_dir():
        shutil.rmtree(folder / ENTRIES, ignore_errors=True)
        shutil.copytree(best / ENTRIES, folder / ENTRIES)
    sys.stderr.write(
        f"best: trial {trials[0]['number']} ({best}). Its entries are those of {folder}: "
        f"predictor={folder}, or moecast zoo push {folder}. Picture: {folder / 'sweep.png'}\n"
    )


def format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw(figure: "Figure", trials: Sequence[Mapping[str, Any]], objective: str) -> None:
    """Draw the best value against the number of trials, and every value against each option."""
    names = list(trials[0]["options"])
    progress, *panels = figure.subplots(1, 1 + len(names), sharey=True)
    in_order = sorted(trials, key=lambda trial: trial["number"])
    best = [max(trial["objective"] for trial in in_order[: i + 1]) for i in range(len(in_order))]
    count = range(1, len(in_order) + 1)
    progress.plot(count, [trial["objective"] for trial in in_order], "o", markersize=4)
    progress.step(count, best, where="post")
    progress.set(xlabel="trials", ylabel=objective)
    progress.locator_params(axis="x", integer=True)
    for axes, name in zip(panels, names, strict=True):
        axes.plot(
            [trial["options"][name] for trial in trials],
            [trial["objective"] for trial in trials],
            "o",
        )
        values = [trial["options"][name] for trial in trials]
        if all(isinstance(value, int | float) for value in values) and min(values) > 0:
            axes.set_xscale("log" if max(values) > 5 * min(values) else "linear")
        axes.set(xlabel=name)
