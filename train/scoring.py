"""All figures of one predictor: accuracy, FetchRate, GoodPred, latency and size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from collect.traces import Trace
from predictors.base import Predictor
from predictors.metrics import good_pred
from runtime.config import SystemConfig
from runtime.sim.hardware import Hardware
from train.accuracy import accuracy_table, score_layers, untouched
from train.horizons import ENTRY, HorizonPredictor, measure_horizons
from train.latency import measure_latency
from train.replay import budget_slots, first_tokens, measure_fetching


@dataclass(frozen=True, kw_only=True)
class EvalContext:
    """The trace, system and machines on which all predictors are scored."""

    trace: Trace
    """Its held-out requests are scored."""
    shifted: Trace | None
    """Prompts of another distribution, all of which are scored; None: not scored."""
    system: SystemConfig
    hardware: tuple[Hardware, ...]
    """Tables by layer show the figures of the first one."""
    budget: str
    replay_tokens: int

    @property
    def setting(self) -> str:
        """Description for tables and model cards."""
        machines = " and ".join(one.name for one in self.hardware)
        return (
            f"system {self.system.name}, hardware {machines}, budget {self.budget}, "
            f"replay of {self.replay_tokens:,} generated held-out tokens"
        )


def score_predictor(predictor: Predictor, context: EvalContext) -> dict[str, Any]:
    """Return all figures of a predictor, as results.json holds them.

    Each part begins with an untouched copy: what the predictor learns while it serves one part does
    not help it in the next.
    """
    table = accuracy_table(score_layers(untouched(predictor), context.trace))
    table["worst_layer_accuracy"] = worst_layer(table["accuracy"])
    machines = {
        one.name: replay_machine(predictor, table, context, one) for one in context.hardware
    }
    first = machines[context.hardware[0].name]
    return {
        **table,
        **first,
        "hardware": {
            name: {key: one[key] for key in ("mean_fetch_rate", "mean_good_pred", "mean_joint")}
            for name, one in machines.items()
        },
        "shifted": None if context.shifted is None else score_shifted(predictor, context.shifted),
        "latency_us": measure_latency(predictor, context.trace),
        "bytes": sum(map(len, predictor.files().values())),
        "horizon": getattr(predictor, "horizon", None),
        "by_horizon": score_horizons(predictor, context)
        if getattr(predictor, "horizons", 1) > 1
        else None,
    }


def replay_machine(
    predictor: Predictor, table: Mapping[str, Any], context: EvalContext, hardware: Hardware
) -> dict[str, Any]:
    """Return FetchRate, GoodPred and the joint figure of a replay on one machine."""
    fetched = replay_context(untouched(predictor), context, hardware)
    pairs = zip(table["accuracy"], fetched["fetch_rate"], strict=True)
    fetched["good_pred"] = [good_pred(accuracy, rate) for accuracy, rate in pairs]
    mean = good_pred(table["mean_accuracy"], fetched["mean_fetch_rate"])
    return {**fetched, "mean_good_pred": mean}


def score_horizons(predictor: Predictor, context: EvalContext) -> dict[str, Any]:
    """Return accuracy and, on the first machine, FetchRate of each horizon by itself."""
    found = measure_horizons(untouched(predictor), context.trace)
    for name, one in found.items():
        if name != ENTRY:
            alone = HorizonPredictor(untouched(predictor), int(name))
            rate = replay_context(alone, context, context.hardware[0])["mean_fetch_rate"]
            one["mean_fetch_rate"] = rate
            one["mean_good_pred"] = good_pred(one["mean_accuracy"], rate)
    return found


def replay_context(
    predictor: Predictor, context: EvalContext, hardware: Hardware
) -> dict[str, Any]:
    spec = context.trace.spec
    return measure_fetching(
        first_tokens(context.trace.steps("held_out"), context.replay_tokens),
        predictor,
        system=context.system,
        hardware=hardware,
        spec=spec,
        slots=budget_slots(context.budget, spec, hardware),
    )


def score_shifted(predictor: Predictor, shifted: Trace) -> dict[str, Any]:
    """Return accuracy on all requests of another distribution.

    A predictor that learns while it serves learns from them.
    """
    table = accuracy_table(score_layers(untouched(predictor), shifted, None))
    return {
        "accuracy": table["accuracy"],
        "mean_accuracy": table["mean_accuracy"],
        "worst_layer_accuracy": worst_layer(table["accuracy"]),
        "tokens": table["tokens"],
        "dataset": shifted.manifest.plan.dataset,
        "trace_digest": shifted.digest,
    }


def worst_layer(accuracy: list[float | None]) -> float | None:
    """Return the lowest accuracy of a layer that is forecast."""
    return min((one for one in accuracy if one is not None), default=None)
