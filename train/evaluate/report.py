"""report.html: the tables and figures of a comparison."""

from collections.abc import Sequence
from pathlib import Path

from predictors.table import Table, TableColumn, format_or_dash, percent
from runtime.tools.comparison import Condition
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.provenance import read_provenance
from train.evaluate.figures import (
    add_batches,
    add_budgets,
    add_distribution,
    add_known,
)
from train.evaluate.jobs import Row
from train.evaluate.table import (
    CONDITION,
    FIGURES,
    KNOWN_NOTE,
    bound_table,
    by_place,
    describe_sample,
    describe_tally,
    known_table,
    winners_table,
)


def write_report(results: Row, rows: Sequence[Row], *, folder: Path, condition: Condition) -> Path:
    """Write the page with its PNGs and CSVs and return its path.

    `rows` have the distributions; `condition` is that of figures that show only one.
    """
    ours = results["ours"]
    report = HtmlReport("Systems compared", subtitle(results), provenance=read_provenance(folder))
    add = report.add
    add("First system of each condition", winners_table(results), note=winners_note(results))
    if results["tally"]["cells"]:
        note = (
            "The least mean TPOT on the machine (the transfers that Belady's policy needs with all "
            "routing known, or the computation) as a share of ours. At worst "
            f"{format_or_dash(results['tally']['worst_of_bound'], percent)}."
        )
        add(f"{ours}: share of the bound", bound_table(results), note=note)
    add_budgets(report, results, condition.batch)
    if results["known"]:
        add_known(report, results)
        add("Share of the bound by known tokens", known_table(results), note=KNOWN_NOTE)
    if len({row["batch"] for row in results["rows"]}) > 1:
        add_batches(report, results, condition.budget)
    add_distribution(report, rows, condition)
    add_all_figures(report, results["rows"])
    systems = [{"name": name, **settings} for name, settings in results["systems"].items()]
    add("Systems and what they forecast with", Table(columns=SYSTEM, rows=systems))
    if results["missing"]:
        add("Left out", Table.of(["what", "why"], [*results["missing"].items()], left=2))
    sources = [(hardware["name"], hardware["source"]) for hardware in results["hardware"]]
    add("Machines", Table.of(["name", "source"], sources, left=2))
    meanings = Table.of(["figure", "meaning"], [*results["definitions"].items()], left=2)
    add("What the figures mean", meanings)
    return report.write(folder)


SYSTEM = (
    TableColumn("system", "name"),
    TableColumn("forecasts with", lambda row: row["predictor"] if row["prefetch"] else None),
    TableColumn("drops", "eviction"),
    TableColumn("chunked"),
    TableColumn("early preemption", "early_preemption"),
    TableColumn("reordered"),
)


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
    return f"{note} `{ours}` is {describe_tally(tally)}." if tally["cells"] else note


def add_all_figures(report: HtmlReport, rows: Sequence[Row]) -> None:
    """Add every figure of every replay, a table for each machine and batch size."""
    for (hardware, batch), here in by_place(rows, *CONDITION).items():
        budgets = list(dict.fromkeys(row["budget"] for row in here))
        here.sort(key=lambda row: (budgets.index(row["budget"]), row["tpot_mean_ms"] or 0.0))
        table = Table(columns=[TableColumn("budget"), *FIGURES], rows=here, left=2)
        report.add(
            f"All figures: {hardware}, batch {batch}",
            table,
            note="TPOT and TTFT: means, with the 95 % interval over requests. Bytes in MiB, for "
            "each generated token; the fastest first.",
        )
