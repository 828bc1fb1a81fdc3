"""Writes the measured tables into the project's README from the committed results."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/path.json"
REPLAY = ROOT / "benchmarks/results/replay.json"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def figure(value: float | None, digits: int = 3) -> str:
    """A dash for what was not measured, never a zero."""
    return "-" if value is None else f"{value:.{digits}f}"


def predictor_rows(predictors: dict[str, Any]) -> list[str]:
    """Means over the layers that a predictor forecasts."""
    rows = []
    for name, table in predictors.items():
        known = [value for value in table["accuracy"] if value is not None]
        horizon = table["horizon"]
        rows.append(
            f"| `{name}` | {'-' if horizon is None else horizon} "
            f"| {figure(table['mean_accuracy'])} | {figure(min(known))} "
            f"| {figure(table['mean_fetch_rate'])} | {figure(table['mean_good_pred'])} "
            f"| {figure(table['mean_joint'])} |"
        )
    return rows


def live_rows(rows: list[dict[str, Any]]) -> list[str]:
    """Live runs by budget, on demand beside prefetching."""
    budgets: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        budgets.setdefault(row["budget"], {})[row["system"]] = row
    lines = []
    for budget, systems in budgets.items():
        demand, promoe = systems["on-demand"], systems["promoe"]
        ratio = demand["tpot_seconds"] / promoe["tpot_seconds"]
        lines.append(
            f"| {budget} | {promoe['arena_bytes'] / 2**20:.1f} MiB "
            f"| {100 * demand['hit_rate']:.0f} % | {100 * promoe['hit_rate']:.0f} % "
            f"| {1000 * demand['tpot_seconds']:.1f} ms | {1000 * promoe['tpot_seconds']:.1f} ms "
            f"| {ratio:.2f}x | yes |"
        )
    return lines


def replay_rows(rows: list[dict[str, Any]]) -> list[str]:
    """Simulated decode and prefill times by budget, each against on-demand of the same budget."""
    lines = []
    for budget in dict.fromkeys(row["budget"] for row in rows):
        arms = {row["arm"]: row for row in rows if row["budget"] == budget}
        base = arms["on-demand"]
        for name, row in arms.items():
            lines.append(
                f"| {budget} | {name} | {100 * row['decode']['hit_rate']:.0f} % "
                f"| {1000 * row['tpot_seconds']:.1f} ms "
                f"| {base['tpot_seconds'] / row['tpot_seconds']:.2f}x "
                f"| {1000 * row['ttft_seconds']:.0f} ms "
                f"| {base['ttft_seconds'] / row['ttft_seconds']:.2f}x |"
            )
    return lines


def measured(report: dict[str, Any], replay: dict[str, Any]) -> str:
    """The section between the marks."""
    machine, train = report["machine"], report["train"]
    loss, routing = report["reference_model"]["loss_nats"], report["reference_model"]["routing"]
    lowest = min(row["entropy_share"] for row in routing["layers"])
    inside = sum(row["request_entropy_share"] for row in routing["layers"]) / len(routing["layers"])
    lines = [
        BEGIN,
        "Forecasts of the reference model's routing on held-out requests "
        f"({train['trace']['held_out_tokens']:,} tokens; {train['setting']}):",
        "",
        "| predictor | layers ahead | Accuracy, mean | worst layer | FetchRate | GoodPred "
        "| needed, predicted and in time |",
        "|---|---|---|---|---|---|---|",
        *predictor_rows(report["predictors"]),
        "",
        "Accuracy is the mean over held-out tokens of |predicted top_k and chosen| / top_k. "
        "FetchRate is the share of predicted experts whose bytes had all arrived before their "
        "layer was routed. GoodPred is Accuracy x FetchRate (promoe 4.1). `skip` is the next "
        "layer's own router on this layer's gate input, `skip-2` that of the layer after. Means "
        "are over the layers that a predictor forecasts.",
        "",
        "What that is worth where an expert has a real size: the same requests replayed on a "
        f"simulated machine ({replay['hardware']['name']}: the machine of promoe 7.1 with experts "
        "as large as those of Qwen1.5-MoE-A2.7B in fp16, 17.3 MB; the link's bandwidth, compute "
        "and predictor latency are in `configs/hardware/`). Medians over "
        f"{replay['new_tokens']} generated tokens; ratios against on-demand LRU of the same "
        "budget. promoe reports 1.31x for decode and 2.21x for prefill on its models:",
        "",
        "| budget | system | hits, decode | TPOT | against on-demand | TTFT | against on-demand |",
        "|---|---|---|---|---|---|---|",
        *replay_rows(replay["rows"]),
        "",
        f"The same model served live from disk (page cache warm) on {machine['cores']} cores of "
        f"{machine['cpu']}, {report['repetitions']} interleaved repetitions, medians; `on-demand` "
        "is LRU without prediction, `promoe` prefetches with `mlp`. Here prefetching does not pay: "
        "an expert is 120 KiB and comes from the page cache in less time than a forecast and the "
        "hand-over to the transfer thread take:",
        "",
        "| budget | memory for experts | hits, on demand | hits, promoe | TPOT, on demand "
        "| TPOT, promoe | speed-up | tokens as Transformers |",
        "|---|---|---|---|---|---|---|---|",
        *live_rows(report["live"]),
        "",
        f"The reference model, trained on {report['reference_model']['trained_tokens'] / 1e6:.1f} "
        f"M tokens: {loss['model']:.2f} nats per held-out token (unigram {loss['unigram']:.2f}, "
        f"bigram {loss['bigram']:.2f}); routing entropy over the corpus at least "
        f"{100 * lowest:.0f} % of even on every layer, {100 * inside:.0f} % within one document; "
        f"LRU over half of the experts hits {routing['lru_hit_rate_50']:.2f} (published routing "
        "of Qwen1.5-MoE: .57).",
        END,
    ]
    return "\n".join(lines)


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    report = json.loads(RESULTS.read_text())
    replay = json.loads(REPLAY.read_text())
    readme.write_text(before + measured(report, replay) + after)


if __name__ == "__main__":
    main()
