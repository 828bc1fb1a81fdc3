"""Tables of predictors, of what bounds them, of eviction, and of drafted tokens."""

from typing import Any

from benchmarks.reports import Document
from benchmarks.tables.markdown import (
    format_figure,
    format_percent,
    format_size,
    markdown_table,
    origin_lines,
    pivot,
    section,
)


def predictors_table(train: Document) -> list[str]:
    """Returns accuracy, TPOT, GoodPred, latency and size of every kind."""
    predictors: dict[str, dict[str, Any]] = train["predictors"]
    machines = list(next(iter(predictors.values()))["hardware"])
    figures = ("mean_fetch_rate", "mean_good_pred")
    rows = []
    for name, predictor in predictors.items():
        alone, shifted = predictor["latency_us"]["1"], predictor["shifted"]
        rows.append(
            [
                f"`{name}`",
                format_figure(predictor["mean_accuracy"]),
                format_figure(predictor["worst_layer_accuracy"]),
                format_figure(None if shifted is None else shifted["mean_accuracy"]),
                " / ".join(f"{predictor['hardware'][m]['mean_tpot_ms']:.1f}" for m in machines),
                *(
                    " / ".join(format_figure(predictor["hardware"][m][key]) for m in machines)
                    for key in figures
                ),
                format_figure(predictor["mean_promoe_good_pred"]),
                "-" if alone is None else f"{alone['layer_p50']:.0f}",
                format_size(predictor["bytes"]),
            ]
        )
    columns = ["predictor", "Accuracy", "worst layer", "Accuracy, shifted", "TPOT, ms", "FetchRate"]
    columns += ["GoodPred", "ProMoE's GoodPred", "µs per layer", "bytes"]
    text = (
        "Forecasts of the reference model's routing on held-out requests "
        f"({train['trace']['held_out_tokens']:,} tokens; {train['setting']}; "
        f"{' / '.join(machines)}; ProMoE's GoodPred on the first); learned networks with eight-bit "
        "weights, as in the built-in zoo. [Metrics](metrics.md) defines the columns; the shifted "
        "prompts are source code, which nothing was trained on; `results/train.json` has every "
        "layer:"
    )
    return section(text, columns, rows, train)


def horizons_table(train: Document) -> list[str]:
    """Returns the accuracy of `residual` by prefetch distance."""
    horizons = train["predictors"]["residual"]["by_horizon"]
    rows = [
        [name, format_figure(row["mean_accuracy"]), format_figure(row["worst_layer_accuracy"])]
        for name, row in sorted(horizons.items())
    ]
    text = (
        "`residual` by distance (0: from what enters a layer to its own router; entry: the first "
        "layers, from the token):"
    )
    return section(text, ["layers ahead", "Accuracy", "worst layer"], rows, train)


def eviction_tables(train: Document) -> list[str]:
    """Returns the hit rates of the eviction policies, of the learned one and of the bound."""
    lines = [
        "Hit rates of decode steps on held-out requests, nothing prefetched, by share of experts "
        "kept (in brackets the share of the gap between LRU and Belady):",
        "",
    ]
    for name, budgets in train["keeping"]["hit_rates"].items():
        columns, rows = pivot(
            [
                {**row, "budget": budget, "policy": policy}
                for budget, policies in budgets.items()
                for policy, row in policies.items()
            ],
            lambda row: f"`{row['policy']}`",
            lambda row: row["budget"],
            lambda row: (
                format_figure(row["decode"])
                if row["decode_gap_closed"] is None or row["policy"] in ("lru", "belady")
                else f"{row['decode']:.3f} ({format_percent(row['decode_gap_closed'])})"
            ),
        )
        lines += [*markdown_table([name, *columns], rows), ""]
    return [*lines, *origin_lines(train)]


LOOKAHEAD = (
    "The reference model",
    "One answer of Qwen3-30B-A3B, published routing without hidden states",
)
"""Models of the two results."""


def lookahead_tables(*reports: Document) -> list[str]:
    """Returns the share of the gap that each policy closes, by model, prompts and budget."""
    lines: list[str] = []
    for model, report in zip(LOOKAHEAD, reports, strict=True):
        rows = [
            row
            for row in report["rows"]
            if row["stream"] == "every token" and row["policy"] not in ("lru", "belady")
        ]
        budgets = list(dict.fromkeys(row["budget"] for row in rows))
        gaps: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            gap = format_percent(row["gap_closed"]).removesuffix(" %")
            gaps.setdefault((row["policy"], row["prompts"]), []).append(gap)
        columns, table = pivot(
            gaps.items(),
            lambda gap: gap[0][0],
            lambda gap: gap[0][1],
            lambda gap: " / ".join(gap[1]),
        )
        text = (
            f"{model}: share of the gap between LRU and Belady that closes, in percent, with "
            f"{' / '.join(budgets)} of the experts in one arena, nothing prefetched "
            f"({report['tokens']:,} tokens of each kind of prompts):"
        )
        lines += section(text, ["policy", *columns], table, report)
    return lines


def drafts_table(*reports: Document) -> list[str]:
    """Returns how fast decoding with drafts is by kind of prompts, and how fast it could be."""
    first = reports[0]
    rows = [
        [row["kind"], *(f"{report['rows'][place]['speed']:.2f}x" for report in reports)]
        for place, row in enumerate(first["rows"])
    ]
    rows += [
        [
            f"{row['drafted']} tokens, always right",
            *(f"{report['right'][place]['speed']:.2f}x" for report in reports),
        ]
        for place, row in enumerate(first["right"])
        if row["drafted"]
    ]
    columns = ["drafts for"]
    columns += [f"`{report['system']}`, {report['budget']} in memory" for report in reports]
    text = (
        "Speed of decoding with `draft=prompt-lookup` over that without, answers of "
        f"{first['new_tokens']} tokens, {first['machine']['threads']} thread; and with drafts that "
        "are always right, the bound of any draft of that length:"
    )
    return section(text, columns, rows, *reports)
