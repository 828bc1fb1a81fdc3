"""Tables of predictors, their ceiling, and eviction."""

from typing import Any

from benchmarks.ceiling import CeilingReport, TrainingRun
from benchmarks.reports import read_report
from benchmarks.tables.markdown import (
    format_figure,
    format_percent,
    format_size,
    markdown_table,
    read_document,
)
from benchmarks.tables.origins import origin_line
from train.table import MACHINE_COLUMNS


def predictors_table() -> list[str]:
    """Returns accuracy, FetchRate, GoodPred, latency and size of every kind."""
    train = read_document("train")
    if train is None:
        return []
    predictors: dict[str, dict[str, Any]] = train["predictors"]
    machines = list(next(iter(predictors.values()))["hardware"])
    rows = []
    for name, predictor in predictors.items():
        alone, shifted = predictor["latency_us"]["1"], predictor["shifted"]
        cells = [
            f"`{name}`",
            format_figure(predictor["mean_accuracy"]),
            format_figure(predictor["worst_layer_accuracy"]),
        ]
        for machine in machines:
            at = predictor["hardware"][machine]
            cells += [format_figure(at[key]) for key in MACHINE_COLUMNS]
        cells += [
            "-" if alone is None else f"{alone['layer_p50']:.0f}",
            format_size(predictor["bytes"]),
            format_figure(None if shifted is None else shifted["mean_accuracy"]),
        ]
        rows.append(cells)
    columns = ["predictor", "Accuracy", "worst layer"]
    names = ("FetchRate", "GoodPred", "GoodPred, covered layers", "resident anyway")
    columns += [f"{name}, {machine}" for machine in machines for name in names]
    return [
        "Forecasts of the reference model's routing on held-out requests "
        f"({train['trace']['held_out_tokens']:,} tokens; {train['setting']}); learned networks "
        "with eight-bit weights, as in the built-in zoo:",
        "",
        *markdown_table([*columns, "us per layer", "bytes", "Accuracy, shifted"], rows),
        "",
        *origin_line("train"),
        "Accuracy is the mean over held-out tokens of |predicted top_k and chosen| / top_k; "
        "FetchRate the share of predicted experts whose bytes had all arrived before their layer "
        "was routed; GoodPred the share of needed experts that were predicted, times FetchRate "
        "(ProMoE, section 4.1; docs/metrics.md). Accuracy is over the layers that a predictor "
        "covers; in GoodPred the others count 0. `skip` is the next layer's own router on this "
        "layer's gate input; `residual` a correction to it, ours. The shifted prompts are source "
        "code, which nothing was trained on. `results/train.json` has every layer.",
        "",
    ]


def horizons_table() -> list[str]:
    """Returns the accuracy of `residual` by prefetch distance."""
    train = read_document("train")
    predictors = {} if train is None else train["predictors"]
    horizons = predictors.get("residual", {}).get("by_horizon")
    if not horizons:
        return []
    rows = [
        [name, format_figure(row["mean_accuracy"]), format_figure(row["worst_layer_accuracy"])]
        for name, row in sorted(horizons.items())
    ]
    return [
        "`residual` by distance (0: from what enters a layer to its own router; entry: the first "
        "layers, from the token):",
        "",
        *markdown_table(["layers ahead", "Accuracy", "worst layer"], rows),
        "",
        *origin_line("train"),
    ]


def ceiling_table() -> list[str]:
    """Returns accuracy against training requests, passes and width."""
    report = read_report("ceiling", CeilingReport)
    if report is None:
        return []
    runs: dict[tuple[TrainingRun, int], dict[int, float]] = {}
    for row in report.rows:
        runs.setdefault((row.run, row.train_tokens), {})[row.horizon] = row.mean_accuracy
    rows = [
        [f"`{run.predictor}`", run.requests, f"{tokens:,}", str(run.width), str(run.passes)]
        + [format_figure(accuracy.get(horizon)) for horizon in range(4)]
        for (run, tokens), accuracy in runs.items()
    ]
    columns = ["predictor", "requests", "tokens", "width", "passes"]
    return [
        "Accuracy against training data, passes and network size, 0 to 3 layers ahead:",
        "",
        *markdown_table([*columns, *(f"{horizon} ahead" for horizon in range(4))], rows),
        "",
        *origin_line("ceiling"),
    ]


def eviction_tables() -> list[str]:
    """Returns the hit rates of the eviction policies, of the learned one and of the bound."""
    train = read_document("train")
    kept = None if train is None else train.get("keeping")
    if not kept:
        return []
    tables: dict[str, Any] = kept["hit_rates"]
    lines = ["Hit rates on held-out requests, nothing prefetched, by share of experts kept:", ""]
    for name, budgets in tables.items():
        rows = []
        for policy in next(iter(budgets.values())):
            cells = [f"`{policy}`"]
            for by_policy in budgets.values():
                row = by_policy[policy]
                gap = row["decode_gap_closed"]
                closed = (
                    ""
                    if gap is None or policy in ("lru", "belady")
                    else f" ({format_percent(gap)})"
                )
                cells.append(format_figure(row["decode"]) + closed)
            rows.append(cells)
        lines += [f"{name}, decode (share of the gap between LRU and Belady):", ""]
        lines += [*markdown_table(["policy", *budgets], rows), ""]
    return [*lines, *origin_line("train")]
