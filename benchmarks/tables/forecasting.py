"""Predictors, their ceiling, and eviction."""

from typing import Any

from benchmarks.tables.markdown import figure, percent, result, size, table


def predictors() -> list[str]:
    """Every kind: accuracy, FetchRate and GoodPred on two machines, latency, bytes, shifted."""
    train = result("train")
    if train is None:
        return []
    found: dict[str, dict[str, Any]] = train["predictors"]
    machines = list(next(iter(found.values()))["hardware"])
    rows = []
    for name, one in found.items():
        alone, shifted = one["latency_us"]["1"], one["shifted"]
        cells = [f"`{name}`", figure(one["mean_accuracy"]), figure(one["worst_layer_accuracy"])]
        for machine in machines:
            at = one["hardware"][machine]
            cells += [figure(at["mean_fetch_rate"]), figure(at["mean_good_pred"])]
        cells += [
            "-" if alone is None else f"{alone['layer_p50']:.0f}",
            size(one["bytes"]),
            figure(None if shifted is None else shifted["mean_accuracy"]),
        ]
        rows.append(cells)
    columns = ["predictor", "Accuracy", "worst layer"]
    columns += [f"{what}, {machine}" for machine in machines for what in ("FetchRate", "GoodPred")]
    return [
        "Forecasts of the reference model's routing on held-out requests "
        f"({train['trace']['held_out_tokens']:,} tokens; {train['setting']}); learned networks "
        "with eight-bit weights, as in the built-in zoo:",
        "",
        *table([*columns, "us a layer", "bytes", "Accuracy, shifted"], rows),
        "",
        "Accuracy is the mean over held-out tokens of |predicted top_k and chosen| / top_k; "
        "FetchRate the share of predicted experts whose bytes had all arrived before their layer "
        "was routed; GoodPred their product (promoe 4.1). Means are over the layers that a "
        "predictor forecasts. `skip` is the next layer's own router on this layer's gate input; "
        "`residual` a correction to it, ours. The shifted prompts are source code, which nothing "
        "was trained on. `results/train.json` has every layer.",
        "",
    ]


def horizons() -> list[str]:
    """How far ahead `residual` sees."""
    train = result("train")
    found = {} if train is None else train["predictors"]
    by = found.get("residual", {}).get("by_horizon")
    if not by:
        return []
    rows = [
        [horizon, figure(one["mean_accuracy"]), figure(one["worst_layer_accuracy"])]
        for horizon, one in sorted(by.items())
    ]
    return [
        "`residual` by distance (0: from what enters a layer to its own router; entry: the first "
        "layers, from the token):",
        "",
        *table(["layers ahead", "Accuracy", "worst layer"], rows),
        "",
    ]


def ceiling() -> list[str]:
    """Accuracy against training requests, passes and width."""
    found = result("ceiling")
    if found is None:
        return []
    keys: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in found["rows"]:
        key = (row["predictor"], row["requests"], row["train_tokens"], row["width"], row["passes"])
        keys.setdefault(key, {})[row["horizon"]] = row["mean_accuracy"]
    rows = [
        [f"`{kind}`", requests, f"{tokens:,}", str(width), str(passes)]
        + [figure(by.get(horizon)) for horizon in (0, 1, 2, 3)]
        for (kind, requests, tokens, width, passes), by in keys.items()
    ]
    columns = ["predictor", "requests", "tokens", "width", "passes"]
    return [
        "Accuracy against training data, passes and network size, 0 to 3 layers ahead:",
        "",
        *table([*columns, *(f"{one} ahead" for one in range(4))], rows),
        "",
    ]


def keeping() -> list[str]:
    """Hit rates of the eviction policies beside the learned one and the bound."""
    train = result("train")
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
                one = by_policy[policy]
                gap = one["decode_gap_closed"]
                closed = "" if gap is None or policy in ("lru", "belady") else f" ({percent(gap)})"
                cells.append(figure(one["decode"]) + closed)
            rows.append(cells)
        lines += [f"{name}, decode (share of the gap between LRU and Belady):", ""]
        lines += [*table(["policy", *budgets], rows), ""]
    return lines
