"""report.html: the tables and figures of a comparison."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.tools.report.page import Page
from train.evaluate.figures import (
    Drawing,
    ablation,
    against_batch,
    against_budget,
    against_distance,
    distribution,
)
from train.evaluate.lanes import timeline_figure
from train.evaluate.table import FIGURES, bound_grid, percent, winners_grid
from train.evaluate.timeline import Span

Row = Mapping[str, Any]


def write_report(
    results: Row,
    cells: Sequence[Row],
    spans: Sequence[Span],
    *,
    subject: str,
    folder: Path,
    budget: str,
    batch: int,
) -> Path:
    """Writes the page with its PNGs and CSVs; returns its path.

    Args:
        cells: every cell's figures with its distribution.
        subject: the system of the ablation and of the distances.
    """
    page = Page("Systems compared", subtitle(results))
    columns, rows = winners_grid(results)
    page.table("Who is first", columns, rows, note=first_note(results))
    columns, rows = bound_grid(results)
    if results["tally"]["cells"]:
        page.table(
            f"{results['ours']}: share of the bound", columns, rows, note=bound_note(results)
        )
    drawings = [against_budget(results, batch)]
    if results["ablation"]:
        drawings.append(ablation(results, subject))
    if len({row["batch"] for row in results["rows"]}) > 1:
        drawings.append(against_batch(results, budget))
    if results["distance"]:
        drawings.append(against_distance(results, subject))
    drawings.append(distribution(results, cells, budget, batch))
    if spans:
        machine = results["machines"][0]["name"]
        drawings.append(timeline_figure(spans, hardware=machine, budget=budget, batch=batch))
    for one in drawings:
        add(page, one)
    cell_tables(page, results)
    page.table(
        "Systems and what they forecast with",
        ["system", "forecasts with", "drops", "chunked", "early preemption", "reordered"],
        [system_row(name, one) for name, one in results["systems"].items()],
    )
    if results["missing"]:
        page.table("Left out", ["what", "why"], list(results["missing"].items()))
    page.table(
        "Machines",
        ["name", "source"],
        [[one["name"], one["source"]] for one in results["hardware"]],
    )
    page.table("What the figures mean", ["figure", "meaning"], list(results["definitions"].items()))
    return page.write(folder)


def add(page: Page, one: Drawing) -> None:
    page.figure(
        one.name, one.heading, one.draw, one.columns, one.rows, note=one.note, inches=one.inches
    )


def subtitle(results: Row) -> str:
    trace, model = results["trace"], results["model"]
    return (
        f"Routing of {model['model_id']} ({model['num_layers']} layers of {model['num_experts']} "
        f"experts, top-{model['top_k']}) on {trace['dataset']}, {results['new_tokens']:,} "
        f"generated held-out tokens; bytes and computation of "
        f"{results['shape']['name']}; simulated machines"
    )


def first_note(results: Row) -> str:
    """What the table of winners says, in a sentence."""
    counted, ours = results["tally"], results["ours"]
    told = (
        "By the median time of a token; the bound is left out. In brackets how much "
        f"longer `{ours}` takes than the first, or, where it is first, than the second (below 0)."
    )
    if not counted["cells"]:
        return told
    return (
        f"{told} `{ours}` is first in {counted['first']} of {counted['cells']} cells and within "
        f"2 % of first in {counted['close']}; at worst "
        f"{100 * counted['worst_behind_first']:+.1f} %."
    )


def bound_note(results: Row) -> str:
    return (
        f"TPOT of `{results['bound']}` (all routing of a token known when it begins, Belady "
        "eviction, the same link and computation) as a share of ours. At worst "
        f"{percent(results['tally']['worst_share_of_bound'])}."
    )


def system_row(name: str, system: Row) -> list[Any]:
    forecast = system["predictor"] if system["prefetch"] else None
    return [
        name,
        forecast,
        system["eviction"],
        *(system[key] for key in ("chunked", "early_preemption", "reordered")),
    ]


def cell_tables(page: Page, results: Row) -> None:
    """Every figure of every cell, a table for each machine and batch size."""
    rows = results["rows"]
    for hardware, batch in dict.fromkeys((row["hardware"], row["batch"]) for row in rows):
        here = [row for row in rows if (row["hardware"], row["batch"]) == (hardware, batch)]
        places = list(dict.fromkeys(row["budget"] for row in here))
        here.sort(key=lambda row: (places.index(row["budget"]), row["tpot_ms"] or 0.0))
        page.table(
            f"All figures: {hardware}, batch {batch}",
            ["budget", "system", *(name for name, _, _ in FIGURES)],
            [
                [row["budget"], row["system"], *(told(row[key]) for _, key, told in FIGURES)]
                for row in here
            ],
            note="Bytes in MiB, for each generated token; the fastest first.",
        )
