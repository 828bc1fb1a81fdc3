"""Records the activity of the link and the computation during a few layers of one token."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from collect.traces import Trace
from runtime.policy.eviction.protocol import Expert
from train.evaluate.forecasts import routing_only
from train.evaluate.jobs import ReplayJob, replay_case
from train.evaluate.sources import StoredPredictor
from train.evaluate.variants import ReplayCase

WARM_TOKENS = 48
"""Tokens generated before the one that is shown, so that arenas are full."""

NUM_LAYERS = 4
"""Layers from the middle of the model: transfers of a whole token would be too small to see."""


@dataclass(frozen=True)
class TimelineSpan:
    """Something that the computation or the link did, from the beginning of the window."""

    system: str
    kind: str
    """compute, stall, fetch (requested by a router) or prefetch (by a forecast)."""
    start_ms: float
    end_ms: float
    layer: int | None
    """None: the parts of a layer other than its experts."""
    expert: int | None


def record_timeline(
    case: ReplayCase, trace: Trace, predictors: Mapping[str, StoredPredictor]
) -> list[TimelineSpan]:
    """Return one variant's spans, cut at the edges of the window that is shown."""
    spec, variant = trace.spec, case.variant
    job = ReplayJob(
        trace=Path(trace.path),
        spec=spec,
        batch=case.condition.batch,
        new_tokens=WARM_TOKENS * case.condition.batch,
        predictor=variant.predictor,
        reuse_predictor=variant.reuse_predictor,
        predictors=predictors,
    )
    steps = job.steps(trace)
    observed: list[tuple[str, float, float, Expert | None]] = []
    stats = replay_case(
        case,
        [routing_only(step, spec.num_layers) for step in steps],
        job.record(steps),
        spec,
        observer=lambda *span: observed.append(span),
    )
    began = sum(stats.ttft_seconds) + sum(stats.tpot_seconds) - stats.tpot_seconds[-1]
    first = max(0, spec.num_layers // 2 - NUM_LAYERS // 2)
    shown = range(first, min(spec.num_layers, first + NUM_LAYERS))
    computed = [
        (start, end)
        for kind, start, end, expert in observed
        if kind == "compute" and expert is not None and expert[0] in shown and start >= began
    ]
    layers_before = [
        end
        for kind, _, end, expert in observed
        if kind == "compute" and expert is not None and expert[0] == first - 1 and end >= began
    ]
    opens = max(layers_before, default=began)
    closes = max(end for _, end in computed)
    return [
        TimelineSpan(
            variant.label,
            kind,
            1e3 * (max(start, opens) - opens),
            1e3 * (min(end, closes) - opens),
            None if expert is None else expert[0],
            None if expert is None else expert[1],
        )
        for kind, start, end, expert in observed
        if end > opens and start < closes
    ]
