"""report.html: the tables and figures of a comparison, as the papers draw them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predictors.table import Table, TableColumn, format_or_dash, percent
from runtime.tools.comparison import Condition
from runtime.tools.report.figures import (
    SPREADS_NOTE,
    Draw,
    Record,
    Series,
    collect,
    draw_panels,
    draw_spreads,
    pick_spreads,
    rows_height,
    split,
    wide,
)
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.provenance import read_provenance
from runtime.tools.report.series_styles import BOUND, HUES
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
from train.evaluate.variants import TABLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def draw_machines(series: Callable[[list[Record]], Series], **options: Any) -> Draw:
    """Return a function that draws a panel for each machine, with the series of its records."""
    return lambda figure, records: draw_panels(
        figure, {name: series(own) for name, own in split(records, "hardware").items()}, **options
    )


def with_bound(records: list[Record], x: str, y: str, bound: Callable[[Record], Any]) -> Series:
    """Return the series of each system and of the bound of each condition."""
    limits = {record[x]: bound(record) for record in records}
    lines = collect(records, x, y, by="system")
    return {**lines, BOUND: (list(limits), list(limits.values()))}


def add_budgets(report: HtmlReport, results: Row, batch: int) -> None:
    """Draw TPOT and TTFT against the budget (ProMoE, figure 10)."""
    rows = [row for row in results["rows"] if row["batch"] == batch]
    for latency, described in (("tpot", "of a generated token"), ("ttft", "of a prefill")):
        report.add(
            f"{latency.upper()} against the memory budget",
            *latency_figure(rows, latency),
            name=f"{latency}-against-budget",
            note=f"Mean time {described}, batch {batch}; as in ProMoE, figure 10. Lower is better; "
            "the shaded area below the bound is out of reach.",
            inches=(wide(len(split(rows, "hardware"))), 4.8),
        )


def latency_figure(rows: Sequence[Row], latency: str) -> tuple[Table, Draw]:
    """Return the values of a latency (`tpot` or `ttft`) at each budget, and how to draw them."""
    mean, interval, bound = f"{latency}_mean_ms", f"{latency}_interval_ms", f"bound_{latency}_ms"
    columns = [
        *map(TableColumn, ("hardware", "budget", "system", mean)),
        TableColumn("from_ms", (interval, 0)),
        TableColumn("to_ms", (interval, 1)),
        TableColumn(bound),
    ]
    draw = draw_machines(
        lambda own: with_bound(own, "budget", mean, lambda record: record[bound]),
        xlabel="memory for experts, share of all",
        ylabel=f"{latency.upper()}, ms (log scale)",
        labels=True,
        log=True,
    )
    return Table(columns=columns, rows=rows), draw


def add_known(report: HtmlReport, results: Row) -> None:
    """Draw the share of the bound against the number of tokens whose routing is known."""
    rows, ours = results["known"], results["ours"]
    batch = rows[0]["batch"]
    own = [row for row in results["rows"] if row["system"] == ours and row["batch"] == batch]
    keys = ("hardware", "budget", "system", "of_bound", "tpot_mean_ms", "bound_tpot_ms")
    report.add(
        "Share of the bound against the tokens whose routing is known",
        Table(columns=[*map(TableColumn, keys)], rows=[*own, *rows]),
        draw=draw_machines(
            lambda records: collect(records, "system", "of_bound", by="budget"),
            xlabel="tokens whose routing is known",
            ylabel="share of the bound",
            labels=True,
            colors=list(HUES.values()),
            ylim=(None, 1.02),
        ),
        name="share-of-the-bound-against-known-tokens",
        note=f"Batch {batch}, a line for each budget. {ours}: forecasts only. 1: the token that is "
        "computed; all: the whole trace, which shows how tight the bound is.",
        inches=(wide(len(split(rows, "hardware"))), 4.2),
    )


def add_batches(report: HtmlReport, results: Row, budget: str) -> None:
    """Draw throughput against the number of requests that decode together (Klotski, figure 10)."""
    rows = [row for row in results["rows"] if row["budget"] == budget]
    tokens_per_step = {
        (row["hardware"], row["batch"]): row["new_tokens"] / row["decode_steps"] for row in rows
    }

    def bound(record: Record) -> float | None:
        if record["bound_tpot_ms"] is None:
            return None
        of_step = tokens_per_step[record["hardware"], record["batch"]]
        return 1e3 * of_step / float(record["bound_tpot_ms"])

    keys = ("hardware", "batch", "system", "tokens_per_second", "tpot_mean_ms", "bound_tpot_ms")
    report.add(
        "Throughput against the batch size",
        Table(columns=[*map(TableColumn, keys)], rows=rows),
        draw=draw_machines(
            lambda own: with_bound(own, "batch", "tokens_per_second", bound),
            xlabel="requests that decode together",
            ylabel="tokens/s (log scale)",
            labels=True,
            log=True,
            upwards=True,
        ),
        name="throughput-against-batch-size",
        note=f"Budget {budget}. Higher is better; the shaded area above the bound is out of reach.",
        inches=(wide(len(split(rows, "hardware"))), 5.0),
    )


def add_distribution(report: HtmlReport, replays: Sequence[Row], condition: Condition) -> None:
    """Draw the distribution of the time of a decode step on each machine (fMoE, figure 10)."""
    values = [
        (row["hardware"], row["system"], percent, value)
        for row in replays
        if row["part"] == TABLE and Condition(row["budget"], row["batch"]) == condition
        for percent, value in enumerate(row["tpot_percentiles_ms"])
    ]

    def draw(figure: "Figure", records: Sequence[Record]) -> None:
        panels = {
            machine: pick_spreads(own, "tpot_ms")
            for machine, own in split(records, "hardware").items()
        }
        draw_spreads(figure, panels, xlabel="time of a token, ms")

    machines, systems = ({value[place] for value in values} for place in (0, 1))
    report.add(
        "Distribution of the time of a token",
        Table.of(["hardware", "system", "percent", "tpot_ms"], values),
        draw=draw,
        name="tpot-distribution",
        note=f"{str(condition).capitalize()}. {SPREADS_NOTE}",
        inches=(wide(len(machines)), rows_height(len(systems))),
    )
