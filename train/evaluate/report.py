"""report.html: the tables and figures of a comparison."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.tools.comparison import Condition
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.provenance import read_provenance
from runtime.tools.report.tables import Row, format_or_dash, percent
from train.evaluate.figures import (
    draw_ablation,
    draw_batches,
    draw_budgets,
    draw_distances,
    draw_distribution,
    draw_known,
    draw_timeline,
)
from train.evaluate.jobs import ReplayRow
from train.evaluate.table import (
    FIGURES,
    KNOWN_NOTE,
    bound_grid,
    describe_sample,
    describe_tally,
    known_grid,
    winners_grid,
)
from train.evaluate.timeline import TimelineSpan


def write_report(
    results: Row,
    rows: Sequence[ReplayRow],
    spans: Sequence[TimelineSpan],
    *,
    folder: Path,
    condition: Condition,
) -> Path:
    """Write the page with its PNGs and CSVs and return its path.

    `rows` have the distributions; `condition` is that of figures that show only one.
    """
    subject, batch = results["ablated"], condition.batch
    page = HtmlReport("Systems compared", subtitle(results), provenance=read_provenance(folder))
    columns, body = winners_grid(results)
    page.table("First system of each condition", columns, body, note=winners_note(results))
    columns, body = bound_grid(results)
    if results["tally"]["cells"]:
        page.table(
            f"{results['ours']}: share of the bound", columns, body, note=bound_note(results)
        )
    draw_budgets(page, results, batch)
    if results["known"]:
        draw_known(page, results)
        columns, body = known_grid(results)
        page.table("Share of the bound by known tokens", columns, body, note=KNOWN_NOTE)
    if results["ablation"]:
        draw_ablation(page, results, subject)
    if len({row["batch"] for row in results["rows"]}) > 1:
        draw_batches(page, results, condition.budget)
    if results["distance"]:
        draw_distances(page, results, subject)
    draw_distribution(page, results, rows, condition)
    if spans:
        machine = results["machines"][0]["name"]
        draw_timeline(page, spans, hardware=machine, condition=condition)
    add_all_figures(page, results)
    page.table(
        "Systems and what they forecast with",
        ["system", "forecasts with", "drops", "chunked", "early preemption", "reordered"],
        [system_row(name, settings) for name, settings in results["systems"].items()],
    )
    if results["missing"]:
        page.table("Left out", ["what", "why"], list(results["missing"].items()))
    page.table(
        "Machines",
        ["name", "source"],
        [[hardware["name"], hardware["source"]] for hardware in results["hardware"]],
    )
    page.table("What the figures mean", ["figure", "meaning"], list(results["definitions"].items()))
    return page.write(folder)


def subtitle(results: Row) -> str:
    """Describe the trace, the model and the machines in a sentence."""
    trace, model = results["trace"], results["model"]
    return (
        f"Routing of {model['model_id']} ({model['num_layers']} layers of {model['num_experts']} "
        f"experts, top-{model['top_k']}) on {trace['dataset']}, "
        f"{describe_sample(results['rows'])}; bytes and computation of "
        f"{results['shape']['name']}; simulated machines"
    )


def winners_note(results: Row) -> str:
    """Explain the table of winners and sum it up."""
    tally, ours = results["tally"], results["ours"]
    note = (
        "By the mean time of a token; systems that know the future are left out. In brackets how "
        f"much longer `{ours}` takes than the first, or, where it is first, than the second (below "
        "0)."
    )
    if not tally["cells"]:
        return note
    return f"{note} `{ours}` is {describe_tally(tally)}."


def bound_note(results: Row) -> str:
    return (
        "The least mean TPOT on the machine (the transfers that Belady's policy needs with all "
        "routing known, or the computation) as a share of ours. At worst "
        f"{format_or_dash(results['tally']['worst_of_bound'], percent)}."
    )


def system_row(name: str, system: Row) -> list[Any]:
    forecast = system["predictor"] if system["prefetch"] else None
    switches = (system[key] for key in ("chunked", "early_preemption", "reordered"))
    return [name, forecast, system["eviction"], *switches]


def add_all_figures(page: HtmlReport, results: Row) -> None:
    """Add every figure of every replay, a table for each machine and batch size."""
    rows = results["rows"]
    for hardware, batch in dict.fromkeys((row["hardware"], row["batch"]) for row in rows):
        here = [row for row in rows if (row["hardware"], row["batch"]) == (hardware, batch)]
        budgets = list(dict.fromkeys(row["budget"] for row in here))
        here.sort(key=lambda row: (budgets.index(row["budget"]), row["tpot_mean_ms"] or 0.0))
        page.table(
            f"All figures: {hardware}, batch {batch}",
            ["budget", "system", *(column.heading for column in FIGURES)],
            [
                [row["budget"], row["system"], *(column.text(row) for column in FIGURES)]
                for row in here
            ],
            note="TPOT and TTFT: means, with the 95 % interval over requests. Bytes in MiB, for "
            "each generated token; the fastest first.",
        )
