"""What the link and the computation do during a few layers of one token, system by system."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collect.traces import Trace
from runtime.policy.eviction.protocol import Expert
from runtime.sim.hardware import Hardware
from runtime.sim.replay import replay
from train.evaluate.cells import TABLE, Arm, Cell
from train.evaluate.replaying import Job, predictor_of, record_all
from train.evaluate.sources import Source
from train.evaluate.steps import held_out_steps, routed
from train.replay import budget_slots

WARM_TOKENS = 48
"""Generated before the token that is shown, so that arenas are full."""

NUM_LAYERS = 4
"""Layers that are shown, from the middle: of a whole token single transfers could not be seen."""


@dataclass(frozen=True)
class Span:
    """One thing that happened, in milliseconds from the first one shown."""

    system: str
    kind: str
    """compute, stall, fetch (a router asked), prefetch (a forecast did)."""
    start_ms: float
    end_ms: float
    layer: int | None
    """None: all of a layer but its experts."""
    expert: int | None


def timelines(
    arms: Sequence[Arm],
    *,
    trace: Trace,
    sources: Mapping[str, Source],
    hardware: Hardware,
    budget: str,
    batch: int,
) -> list[Span]:
    """The same layers of the same token with each system."""
    found: list[Span] = []
    for arm in arms:
        cell = Cell(part=TABLE, arm=arm, hardware=hardware, budget=budget, batch=batch)
        found += timeline(cell, trace, sources)
    return found


def timeline(cell: Cell, trace: Trace, sources: Mapping[str, Source]) -> list[Span]:
    """One system's spans, those that reach into the window cut at its edges."""
    spec, arm = trace.spec, cell.arm
    job = Job(
        trace=Path(trace.path),
        spec=spec,
        batch=cell.batch,
        new_tokens=WARM_TOKENS * cell.batch,
        predictor=arm.predictor,
        reuse_predictor=arm.reuse_predictor,
        sources=sources,
        cells=(),
    )
    steps = held_out_steps(trace, batch=job.batch, new_tokens=job.new_tokens)
    recorded = record_all(job, steps)
    told: list[tuple[str, float, float, Expert | None]] = []
    stats = replay(
        [routed(step, spec.num_layers) for step in steps],
        predictor_of(cell, recorded, spec),
        spec=spec,
        system=arm.system,
        hardware=cell.hardware,
        budget_slots=budget_slots(cell.budget, spec, cell.hardware),
        reuse_predictor=None
        if arm.reuse_predictor is None
        else recorded[arm.reuse_predictor].predictor(spec),
        observer=lambda *span: told.append(span),
    )
    began = sum(stats.ttft_seconds) + sum(stats.tpot_seconds) - stats.tpot_seconds[-1]
    first = max(0, spec.num_layers // 2 - NUM_LAYERS // 2)
    shown = range(first, min(spec.num_layers, first + NUM_LAYERS))
    computed = [
        (start, end)
        for kind, start, end, expert in told
        if kind == "compute" and expert is not None and expert[0] in shown and start >= began
    ]
    layers_before = [
        end
        for kind, _, end, expert in told
        if kind == "compute" and expert is not None and expert[0] == first - 1 and end >= began
    ]
    opens = max(layers_before, default=began)
    closes = max(end for _, end in computed)
    return [
        Span(
            arm.label,
            kind,
            1e3 * (max(start, opens) - opens),
            1e3 * (min(end, closes) - opens),
            None if expert is None else expert[0],
            None if expert is None else expert[1],
        )
        for kind, start, end, expert in told
        if end > opens and start < closes
    ]
