"""Figures and tables of the value and cost of forecasts: caches, latency."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from predictors.table import Table, TableColumn, decimals
from runtime.tools.report.figures import Record, draw_bars, render_figure, rows_height, split, wide
from runtime.tools.report.html_report import HtmlReport
from train.eviction_eval import HitRates
from train.report.forecasts import Predictors
from zoo.card import CardFigure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HIT_RATE_HEADING = "Hit rate of each eviction policy, by cache size"


def hit_rate(
    report: HtmlReport, tables: Mapping[str, Mapping[str, HitRates]], *, num_tokens: int
) -> None:
    """Draw the hit rate of every eviction policy at every cache size, `tables[budget][policy]`."""
    rows = hit_rate_records(tables)
    if any(row["hit_rate"] is None for row in rows):
        report.add(HIT_RATE_HEADING, note="The trace has no generated tokens.")
        return
    report.add(
        HIT_RATE_HEADING,
        Table(columns=[TableColumn(key) for key in rows[0]], rows=rows),
        draw_hit_rates,
        name="hit-rate-by-eviction-policy",
        note="Share of the experts that generated tokens need which are in the arena when their "
        f"router asks; nothing is prefetched, the arena is divided by layers, {num_tokens:,} "
        "generated held-out tokens. `belady` knows the future: the bound.",
        inches=(wide(len(tables)), rows_height(len(rows) // len(tables))),
    )


def hit_rate_records(tables: Mapping[str, Mapping[str, HitRates]]) -> list[dict[str, Any]]:
    """Return a row for each cache size and policy, in decode."""
    return [
        {
            "cache_percent": int(budget.rstrip("%")),
            "eviction": policy,
            "hit_rate": rates["decode"],
            "gap_closed": rates["decode_gap_closed"],
        }
        for budget, policies in tables.items()
        for policy, rates in policies.items()
    ]


def draw_hit_rates(figure: "Figure", records: Sequence[Record]) -> None:
    """Draw a panel for each cache size with a row for each policy, the best on top.

    Args:
        records: `cache_percent`, `eviction` and `hit_rate` of each.
    """
    means = {
        policy: sum(record["hit_rate"] for record in own)
        for policy, own in split(records, "eviction").items()
    }
    order = sorted(means, key=lambda policy: -means[policy])
    panels = {}
    for size, own in split(records, "cache_percent").items():
        rates = {record["eviction"]: 100 * record["hit_rate"] for record in own}
        panels[f"cache of {size} %"] = {policy: rates[policy] for policy in order}
    draw_bars(figure, panels, xlabel="hit rate, %")


def draw_reuse_figure(tables: Mapping[str, Mapping[str, HitRates]]) -> CardFigure | None:
    """Draws the hit rate of each policy by cache size, `tables[budget][policy]`, in decode."""
    records = hit_rate_records(tables)
    if any(record["hit_rate"] is None for record in records):
        return None
    inches = (wide(len(tables)), rows_height(len(records) // len(tables)))
    png = render_figure(draw_hit_rates, records, inches=inches, title=HIT_RATE_HEADING)
    return CardFigure(png, "Hit rate of each eviction policy on held-out generated tokens")


def latency_table(report: HtmlReport, predictors: Predictors, num_layers: int) -> None:
    """Add the times of each predictor's events, and its size."""
    batches = sorted({int(batch) for one in predictors.values() for batch in one["latency_us"]})

    def whole_step(row: Mapping[str, Any]) -> float | None:
        alone = row["latency_us"][str(batches[0])]
        return alone and num_layers * alone["layer_p50"] + alone["begin_and_end_p50"]

    columns = [
        TableColumn("predictor"),
        TableColumn("size, KiB", lambda row: row["bytes"] / 1024, decimals),
        *(
            TableColumn(
                f"{what}, batch {batch}, us", ("latency_us", str(batch), f"layer_{what}"), decimals
            )
            for batch in batches
            for what in ("p50", "p99")
        ),
        TableColumn("a whole step, batch 1, us", whole_step, decimals),
    ]
    report.add(
        "Latency and size",
        Table(
            columns=columns, rows=[{"predictor": name, **one} for name, one in predictors.items()]
        ),
        note="Median and 99th percentile of the time that the events of one layer take, on the "
        "machine that trained; a whole step: all layers' medians, and its beginning and end, where "
        "a predictor that needs no state of the model does its work.",
    )
