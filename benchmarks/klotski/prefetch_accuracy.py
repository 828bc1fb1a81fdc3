"""Accuracy of prefetched hot experts (Klotski, section 9.6 and figure 13)."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from predictors.base import Predictor, Signal
from runtime.sim.routing import count_tokens
from runtime.sim.step import RecordedStep, replay_step


class HotCounts(NamedTuple):
    """Experts that were prefetched for one step, in all layers."""

    prefetched: int
    involved: int
    """Some token was routed to them: "actually involved in the computations"."""
    hot: int
    """They are among the K experts with the most tokens, of K prefetched ones: "the accuracy of
    the selected hot experts"."""


def count_hot(predictor: Predictor, steps: Iterable[RecordedStep]) -> Iterator[HotCounts]:
    """Yields the counts of each step; the last forecast of a layer before it is routed counts.

    Args:
        predictor: Forecasts the experts to prefetch, such as `correlation`.
        steps: Steps of single requests, or of groups.
    """
    spec = predictor.spec
    for step in steps:
        prefetched = involved = hot = 0
        wanted: dict[int, set[int]] = {}
        for event in replay_step(predictor, step, num_layers=spec.num_layers):
            if event.signal is Signal.ROUTED and (chosen := wanted.pop(event.layer, None)):
                tokens = count_tokens(step.experts(event.layer), spec.num_experts)
                hottest = sorted(tokens, key=lambda e: -tokens[e])[: len(chosen)]
                prefetched += len(chosen)
                involved += len(chosen & tokens.keys())
                hot += len(chosen.intersection(hottest))
            wanted |= {
                forecast.layer: set(forecast.experts(spec.top_k)) for forecast in event.forecasts
            }
        yield HotCounts(prefetched, involved, hot)
