"""Klotski, table 3: throughput of its steps, one added after another."""

from dataclasses import dataclass, replace

from benchmarks.papers.claims import FigureReplay
from benchmarks.papers.paper_context import PaperContext, experts_bytes, load_hardware, load_shape
from runtime.presets import load_system

PAPER = "klotski"
BATCH, GROUP = 3, 15
"""Requests of a batch, and batches of a group (n = 15: section 9.2). The held-out requests suffice
for no more."""


@dataclass(frozen=True)
class KlotskiEnvironment:
    """A model on a machine of the paper."""

    shape: str
    hardware: str
    arena_bytes: float
    """Device memory for experts."""

    @property
    def share(self) -> float:
        """Share of all experts that fit."""
        return min(1.0, self.arena_bytes / experts_bytes(load_shape(self.shape)))


ENVIRONMENTS = {
    "environment 1, Mixtral-8x7B": KlotskiEnvironment("mixtral-8x7b", "rtx3090-disk", 20e9),
    "environment 1, Mixtral-8x22B": KlotskiEnvironment("mixtral-8x22b", "rtx3090-disk", 20e9),
    "environment 2, Mixtral-8x22B": KlotskiEnvironment("mixtral-8x22b", "h800-pcie5", 70e9),
}
PUBLISHED = {
    "environment 1, Mixtral-8x7B": (5.721, 18.24, 19.074, 22.414, 22.604),
    "environment 1, Mixtral-8x22B": (0.01, 0.97, 1.127, 1.325, 1.366),
    "environment 2, Mixtral-8x22B": (1.149, 34.07, 44.17, 52.85, 53.125),
}
"""Columns of table 3, in tokens/s."""
REACHED = (
    "45 tokens reach all 8 experts of a layer and decoding waits for the link 96 % of its time: "
    "neither what is prefetched nor in which order changes much; the paper's 512-token prompts "
    "compute longer"
)
REASONS = {
    "+ Multi batches": "fifteen batches share each fetch; only experts are moved here, the paper "
    "moves attention and caches too",
    "+ Only prefetch hot experts": REACHED,
    "Klotski (+ adjust order)": REACHED,
    "Klotski (q)": "a quarter of the bytes where the link is the bottleneck; turned back into "
    "16 bits is not charged",
}


def table_3(context: PaperContext) -> FigureReplay:
    """Compares each row with the one before it.

    45 requests, prompts and generated tokens, are served in fifteen batches one after another or in
    one group.
    """
    figure = FigureReplay(PAPER)
    klotski = load_system("klotski")
    unordered = replace(klotski, early_preemption=True, reordered=False, hot_first=False)
    whole_layer = replace(unordered, predictor="dependency")
    rows = {
        "Simple pipeline": (whole_layer, BATCH),
        "+ Multi batches": (whole_layer, BATCH * GROUP),
        "+ Only prefetch hot experts": (unordered, BATCH * GROUP),
        "Klotski (+ adjust order)": (klotski, BATCH * GROUP),
        "Klotski (q)": (klotski, BATCH * GROUP),
    }
    for title, environment in ENVIRONMENTS.items():
        before: tuple[str, float, float] | None = None
        for (row, (system, batch)), value in zip(rows.items(), PUBLISHED[title], strict=True):
            shape = load_shape(environment.shape)
            if row.endswith("(q)"):
                quarter = {
                    name: getattr(shape, name) // 4 for name in ("expert_bytes", "layer_bytes")
                }
                shape = replace(
                    shape, name=f"{environment.shape}-int4", bytes_per_weight=0.5, **quarter
                )
            cell = context.run(
                replace(system, name=row),
                shape,
                load_hardware(environment.hardware),
                share=environment.share,
                batch=batch,
            )
            rate = figure.keep(cell, "klotski 3").tokens_per_second
            if before is not None:
                name, published, ours = before
                figure.claim(
                    where="table 3, 9.5",
                    what=f"{title}: '{row}' over '{name}'",
                    paper_value=value / published,
                    ours=rate / ours,
                    reason=REASONS[row],
                )
            before = (row, value, rate)
    return figure


FIGURES = (("table 3", table_3),)
