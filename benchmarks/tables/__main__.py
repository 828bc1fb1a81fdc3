"""`python -m benchmarks.tables`: writes both READMEs' tables from what is in `results/`."""

import json
from pathlib import Path

from benchmarks.tables import comparing, forecasting, grouping, launching, serving, spreading

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def reference_model() -> list[str]:
    """How well it was trained and how it routes."""
    audit = json.loads((ROOT / "runtime/models/qwen2_moe_tiny/audit.json").read_text())
    loss, routing = audit["loss_nats"], audit["routing"]
    lowest = min(row["entropy_share"] for row in routing["layers"])
    inside = sum(row["request_entropy_share"] for row in routing["layers"]) / len(routing["layers"])
    return [
        f"The reference model, trained on {audit['trained_tokens'] / 1e6:.1f} M tokens: "
        f"{loss['model']:.2f} nats per held-out token (unigram {loss['unigram']:.2f}, bigram "
        f"{loss['bigram']:.2f}); routing entropy over the corpus at least {100 * lowest:.0f} % of "
        f"even on every layer, {100 * inside:.0f} % within one document; LRU over half of the "
        f"experts hits {routing['lru_hit_rate_50']:.2f} (published routing of Qwen1.5-MoE: .57).",
    ]


def write(path: Path, sections: list[list[str]]) -> None:
    """Puts the sections between the marks."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [line for section in sections for line in section]
    path.write_text("\n".join([before + BEGIN, *lines, END]) + after)


def main() -> None:
    write(
        ROOT / "README.md",
        [
            forecasting.predictors(),
            comparing.replayed(),
            comparing.live(),
            comparing.peers(),
            grouping.grouped(),
            serving.withstood(),
            serving.arrivals(),
            reference_model(),
        ],
    )
    write(
        ROOT / "benchmarks/README.md",
        [
            forecasting.predictors(),
            forecasting.horizons(),
            forecasting.ceiling(),
            forecasting.keeping(),
            comparing.replayed(every=True),
            comparing.replayed(batch=8, every=True),
            comparing.live(every=True),
            comparing.validated(),
            comparing.peers(),
            grouping.grouped(every=True),
            comparing.papers(),
            spreading.scaled(),
            launching.launchers(),
            serving.withstood(),
            serving.arrivals(),
        ],
    )


if __name__ == "__main__":
    main()
