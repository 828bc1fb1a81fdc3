"""All figures of one predictor: how right it is, in time, elsewhere, how fast and how large."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from collect.traces import Trace
from predictors.base import Predictor
from predictors.metrics import good_pred
from runtime.config import SystemConfig
from runtime.sim.hardware import Hardware
from train.accuracy import accuracy_table, fresh, score
from train.horizons import ENTRY, OnlyAhead, by_horizon
from train.latency import latency
from train.replay import budget_slots, fetch_table, first_tokens


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What predictors are scored on, all of them on the same."""

    trace: Trace
    """Its held-out requests."""
    shifted: Trace | None
    """Prompts of another distribution, all of them; None: not scored."""
    system: SystemConfig
    hardware: tuple[Hardware, ...]
    """The first one's figures stand in the tables by layer."""
    budget: str
    replay_tokens: int

    @property
    def setting(self) -> str:
        """In words, for tables and cards."""
        machines = " and ".join(one.name for one in self.hardware)
        return (
            f"system {self.system.name}, hardware {machines}, budget {self.budget}, "
            f"replay of {self.replay_tokens:,} generated held-out tokens"
        )


def scored(predictor: Predictor, ground: Ground) -> dict[str, Any]:
    """Each part begins with the predictor as it was made: what it learns while one part serves it
    does not help it in the next.
    """
    table = accuracy_table(score(fresh(predictor), ground.trace))
    table["worst_layer_accuracy"] = worst(table["accuracy"])
    machines = {one.name: in_time(predictor, table, ground, one) for one in ground.hardware}
    first = machines[ground.hardware[0].name]
    return {
        **table,
        **first,
        "hardware": {
            name: {key: one[key] for key in ("mean_fetch_rate", "mean_good_pred", "mean_joint")}
            for name, one in machines.items()
        },
        "shifted": None if ground.shifted is None else elsewhere(predictor, ground.shifted),
        "latency_us": latency(predictor, ground.trace),
        "bytes": sum(map(len, predictor.files().values())),
        "horizon": getattr(predictor, "horizon", None),
        "by_horizon": by_distance(predictor, ground)
        if getattr(predictor, "horizons", 1) > 1
        else None,
    }


def in_time(
    predictor: Predictor, table: Mapping[str, Any], ground: Ground, hardware: Hardware
) -> dict[str, Any]:
    """FetchRate, GoodPred and the joint figure of one machine, from a replay."""
    fetched = fetched_in(fresh(predictor), ground, hardware)
    pairs = zip(table["accuracy"], fetched["fetch_rate"], strict=True)
    fetched["good_pred"] = [good_pred(accuracy, rate) for accuracy, rate in pairs]
    mean = good_pred(table["mean_accuracy"], fetched["mean_fetch_rate"])
    return {**fetched, "mean_good_pred": mean}


def by_distance(predictor: Predictor, ground: Ground) -> dict[str, Any]:
    """Accuracy at each horizon and, on the first machine, what it fetches in time by itself."""
    found = by_horizon(fresh(predictor), ground.trace)
    for name, one in found.items():
        if name != ENTRY:
            alone = OnlyAhead(fresh(predictor), int(name))
            rate = fetched_in(alone, ground, ground.hardware[0])["mean_fetch_rate"]
            one["mean_fetch_rate"] = rate
            one["mean_good_pred"] = good_pred(one["mean_accuracy"], rate)
    return found


def fetched_in(predictor: Predictor, ground: Ground, hardware: Hardware) -> dict[str, Any]:
    spec = ground.trace.spec
    return fetch_table(
        first_tokens(ground.trace.steps("held_out"), ground.replay_tokens),
        predictor,
        system=ground.system,
        hardware=hardware,
        spec=spec,
        slots=budget_slots(ground.budget, spec, hardware),
    )


def elsewhere(predictor: Predictor, shifted: Trace) -> dict[str, Any]:
    """Accuracy on all requests of another distribution; one that learns, learns on the way."""
    table = accuracy_table(score(fresh(predictor), shifted, None))
    return {
        "accuracy": table["accuracy"],
        "mean_accuracy": table["mean_accuracy"],
        "worst_layer_accuracy": worst(table["accuracy"]),
        "tokens": table["tokens"],
        "dataset": shifted.manifest.plan.dataset,
        "trace_digest": shifted.digest,
    }


def worst(accuracy: list[float | None]) -> float | None:
    """Of the layers that are forecast."""
    return min((one for one in accuracy if one is not None), default=None)
