"""The tables of README.md, docs and benchmarks/README.md, and the command that writes them."""

import json

from benchmarks.process import ROOT
from benchmarks.tables import capacity, forecasting, formats, grouping, peers, serving, systems
from benchmarks.tables.config import TablesConfig
from benchmarks.tables.figures import draw_figures
from benchmarks.tables.markdown import show_figure

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
"""Marks around generated lines; of several such parts of a page the first is its first section."""


def reference_model() -> list[str]:
    """Returns the reference model's loss and routing."""
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


def replace_tables(text: str, sections: list[list[str]]) -> str:
    """Returns a page with new lines between the marks: each pair but the last has one section."""
    before, *parts = text.split(BEGIN)
    written = [before]
    for place, part in enumerate(parts, start=1):
        own = sections if place == len(parts) else [sections[0]]
        sections = sections[len(own) :]
        _, _, after = part.partition(END)
        written += ["\n".join([BEGIN, *(line for lines in own for line in lines), END]), after]
    return "".join(written)


def list_tables() -> dict[str, list[list[str]]]:
    """Returns the lines of each section, by the page that has them between the marks."""
    return {
        "README.md": [peers.gain(), peers.speed_table()],
        "docs/results.md": [
            ["## Forecasts", ""],
            forecasting.predictors_table(),
            show_figure("accuracy-by-layer", "Accuracy of each predictor, by layer"),
            ["## Eviction", ""],
            show_figure("hit-rate-by-eviction-policy", "Hit rates of eviction policies"),
            ["## Simulated machines", ""],
            systems.replayed_table(),
            show_figure(
                "simulated/share-of-the-bound-against-known-tokens",
                "Share of the bound against known tokens",
            ),
            show_figure("simulated/tpot-against-budget", "Simulated TPOT against the budget"),
            show_figure("simulated/ttft-against-budget", "Simulated TTFT against the budget"),
            systems.ablation_shares(),
            ["## Real routing", ""],
            systems.routing_table(),
            ["## Live runs", ""],
            systems.live_table(),
            show_figure("tpot-against-budget", "Live TPOT against the budget"),
            systems.prefill_table(),
            ["## The simulator", ""],
            systems.validated_table(),
            ["## The control plane", ""],
            systems.control_plane_table(),
            ["## Other programs", ""],
            peers.peers_section(),
            ["## Formats", ""],
            formats.formats_table(),
            formats.quality_table(),
            formats.dequantise_table(),
            formats.lockstep_table(),
            ["## Batch mode", ""],
            grouping.groups_table(),
            ["## Drafted tokens", ""],
            forecasting.drafts_table(),
            ["## The server", ""],
            serving.robustness_table(),
            serving.arrivals_table(),
            ["## The reference model", ""],
            reference_model(),
        ],
        "docs/laptop.md": [formats.real_size_table()],
        "docs/capacity.md": [capacity.capacity_tables()],
        "benchmarks/README.md": [
            forecasting.horizons_table(),
            forecasting.ceiling_table(),
            forecasting.eviction_tables(),
            forecasting.lookahead_tables(),
            systems.replayed_table(batch=8),
            grouping.group_sizes_tables(),
            systems.papers_table(),
            systems.scaling_tables(),
        ],
    }


def run_tables(config: TablesConfig) -> None:
    """Writes the tables of README.md, docs and benchmarks/README.md, then draws the figures."""
    del config
    for name, sections in list_tables().items():
        path = ROOT / name
        path.write_text(replace_tables(path.read_text(), sections))
    draw_figures()
