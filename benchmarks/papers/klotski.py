"""klotski table 3: what its steps add, in generated tokens a second."""

from dataclasses import replace

from benchmarks.papers.claim import Claim, Part
from benchmarks.papers.ground import Ground, experts_bytes, machine, shape_named

BATCH, GROUP = 3, 15
"""Requests of a batch, and batches of a group (n = 15: 9.2); more than this the held-out requests
do not give."""
ENVIRONMENTS = {
    "environment 1, Mixtral-8x7B": (
        "mixtral-8x7b",
        "rtx3090-disk",
        20e9,
        (5.721, 18.24, 19.074, 22.414, 22.604),
    ),
    "environment 1, Mixtral-8x22B": (
        "mixtral-8x22b",
        "rtx3090-disk",
        20e9,
        (0.01, 0.97, 1.127, 1.325, 1.366),
    ),
    "environment 2, Mixtral-8x22B": (
        "mixtral-8x22b",
        "h800-pcie5",
        70e9,
        (1.149, 34.07, 44.17, 52.85, 53.125),
    ),
}
"""Shape, machine, bytes of its device memory for experts, and the table's column."""
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


def table_3(ground: Ground) -> Part:
    """Each row over the one before it: 45 requests, prompts and generated tokens, in fifteen
    batches one after another or in one group.
    """
    part = Part()
    klotski = ground.systems["klotski"]
    unordered = replace(klotski, early_preemption=True, reordered=False, hot_first=False)
    whole_layer = replace(unordered, predictor="dependency")
    rows = {
        "Simple pipeline": (whole_layer, BATCH),
        "+ Multi batches": (whole_layer, BATCH * GROUP),
        "+ Only prefetch hot experts": (unordered, BATCH * GROUP),
        "Klotski (+ adjust order)": (klotski, BATCH * GROUP),
        "Klotski (q)": (klotski, BATCH * GROUP),
    }
    for title, (model, hardware, room, values) in ENVIRONMENTS.items():
        before: tuple[str, float, float] | None = None
        for (row, (system, batch)), value in zip(rows.items(), values, strict=True):
            shape = shape_named(model)
            share = min(1.0, room / experts_bytes(shape))
            if row.endswith("(q)"):
                quarter = {
                    name: getattr(shape, name) // 4 for name in ("expert_bytes", "layer_bytes")
                }
                shape = replace(shape, name=f"{model}-int4", bytes_per_weight=0.5, **quarter)
            cell = ground.run(
                replace(system, name=row), shape, machine(hardware), share=share, batch=batch
            )
            rate = part.keep(cell, figure="klotski 3")["tokens_per_second"]
            if before is not None:
                name, published, ours = before
                part.claims.append(
                    Claim(
                        paper="klotski",
                        where="table 3, 9.5",
                        what=f"{title}: '{row}' over '{name}'",
                        paper_value=value / published,
                        ours=rate / ours,
                        reason=REASONS[row],
                    )
                )
            before = (row, value, rate)
    return part


FIGURES = (("table 3", table_3),)
