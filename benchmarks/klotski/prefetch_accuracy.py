"""Accuracy of prefetched hot experts (Klotski, section 9.6 and figure 13)."""

from collections.abc import Iterable, Iterator

from predictors.base import Predictor, Signal
from runtime.policy.device_cache import count_tokens
from runtime.sim.step import RecordedStep, replay_step


def count_hot(predictor: Predictor, steps: Iterable[RecordedStep]) -> Iterator[tuple[int, int]]:
    """Yields the experts that were prefetched for each step, in all layers, and the hot ones.

    Hot are those among the K experts with the most tokens, of K prefetched ones: "the accuracy of
    the selected hot experts". The last forecast of a layer before it is routed counts.

    Args:
        predictor: Forecasts the experts to prefetch, such as `correlation`.
        steps: Steps of single requests, or of groups.
    """
    spec = predictor.spec
    for step in steps:
        prefetched = hot = 0
        wanted: dict[int, set[int]] = {}
        for event in replay_step(predictor, step, num_layers=spec.num_layers):
            if event.signal is Signal.ROUTED and (chosen := wanted.pop(event.layer, None)):
                tokens = count_tokens(step.experts(event.layer), spec.num_experts)
                hottest = sorted(tokens, key=lambda e: -tokens[e])[: len(chosen)]
                prefetched += len(chosen)
                hot += len(chosen.intersection(hottest))
            wanted |= {
                forecast.layer: set(forecast.experts(spec.top_k)) for forecast in event.forecasts
            }
        yield prefetched, hot
