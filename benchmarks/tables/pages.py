"""The tables of README.md, docs and benchmarks/README.md, and the command that writes them."""

import json
import re
from collections.abc import Callable, Container

from benchmarks.config import TablesConfig
from benchmarks.process import ROOT
from benchmarks.reports import read_document
from benchmarks.tables import capacity, forecasting, formats, grouping, peers, serving, systems
from benchmarks.tables.figures import draw_figures
from benchmarks.tables.origins import refuse_unclean, warn_of_changes
from predictors.errors import MoecastError

PAGES = (
    *("README.md", "docs/results.md", "docs/laptop.md", "docs/capacity.md"),
    "benchmarks/README.md",
)
MARKED = re.compile(r"(<!--(\w+)-->\n).*?<!--end-->", re.DOTALL)
"""A table on a page: `<!--FUNCTION-->`, the lines that the function writes, and `<!--end-->`."""


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


TABLES: dict[Callable[..., list[str]], tuple[str, ...]] = {
    peers.gain: ("bench",),
    peers.speed_table: ("bench",),
    peers.describe_others: ("peers",),
    forecasting.predictors_table: ("train",),
    systems.replayed_table: ("evaluate",),
    systems.ablation_shares: ("moecast",),
    systems.routing_table: ("routing",),
    systems.live_table: ("bench",),
    systems.prefill_table: ("prefill",),
    systems.validated_table: ("validate",),
    systems.control_plane_table: ("control_plane",),
    peers.peers_section: ("peers",),
    formats.formats_table: ("formats",),
    formats.payoff_table: ("payoff",),
    formats.quality_table: ("quantised",),
    formats.dequantise_table: ("dequantise",),
    formats.lockstep_table: ("lockstep",),
    formats.real_size_table: ("real_size",),
    grouping.groups_table: ("klotski",),
    forecasting.drafts_table: ("drafts", "drafts_resident"),
    serving.robustness_table: ("serving",),
    serving.arrivals_table: ("serving",),
    reference_model: (),
    capacity.capacity_tables: ("capacity",),
    forecasting.horizons_table: ("train",),
    forecasting.eviction_tables: ("train",),
    forecasting.lookahead_tables: ("lookahead", "lookahead_published"),
    systems.replayed_batches_table: ("evaluate",),
    grouping.group_sizes_tables: ("klotski",),
    systems.papers_table: ("papers",),
    systems.scaling_tables: ("scaling",),
}
"""Each function that writes a table, and the results that it takes."""
FUNCTIONS = {write.__name__: write for write in TABLES}


def fill_page(text: str, refused: Container[str]) -> str:
    """Returns a page with the tables of today's results; those of refused ones stay as they are."""

    def fill(found: re.Match[str]) -> str:
        write = FUNCTIONS[found[2]]
        names = TABLES[write]
        if any(name in refused for name in names):
            return found[0]
        return found[1] + "\n".join([*write(*map(read_document, names)), "<!--end-->"])

    return MARKED.sub(fill, text)


def run_tables(config: TablesConfig) -> None:
    """Writes the tables of README.md, docs and benchmarks/README.md, then draws the figures.

    Raises:
        MoecastError: at the end, if results were refused.
    """
    del config
    refused = refuse_unclean()
    warn_of_changes()
    for page in PAGES:
        path = ROOT / page
        path.write_text(fill_page(path.read_text(), refused))
    draw_figures(refused)
    if refused:
        raise MoecastError(
            f"tables and figures of {', '.join(refused)} stay as they are: commit the code, and "
            "measure again"
        )
