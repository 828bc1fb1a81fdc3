"""Accuracy of forecasts of the reference model's routing against training tokens, size and time.

Trains `residual` (its sources that look ahead) and the published `mlp` and `stride` on nested
subsets of the trace's training requests, and scores the weights of the last pass on all held-out
requests. A row is written as soon as it is known; existing rows are not computed again, so that an
interrupted run resumes. One thread, 3 GB of memory, an hour or two.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from lightning.pytorch import seed_everything
from numpy.typing import NDArray

from benchmarks.config import CeilingConfig
from benchmarks.reports import print_line, write_report
from collect.traces import Trace, TraceSignal
from collect.traces.layout import Split
from configs.compose import compose_typed
from predictors.base import Floats
from predictors.errors import MoecastError
from train.config import TrainConfig
from train.data import Batch, read_contexts, shuffle_rows
from train.networks import PlainStack, network_specs
from train.pipeline import HORIZONS
from train.predictor_stack import PredictorStack, StackFit
from train.residual import DECAYS, ResidualStack
from train.routers import RouterWeights

BATCH, EVALUATED = 256, 1024
LR, WEIGHT_DECAY, SEED = 4e-3, 1e-2, 0
"""Those of `python -m train`."""
POOL_ROWS = 65_536
COLD_REQUESTS = 180
"""Training prompts that the 9:1 split leaves of 200."""
SHARES: Mapping[str, float | None] = {"1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "1": 1.0}
SIGNALS = (TraceSignal.LAYER_INPUT, TraceSignal.GATE_INPUT)


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Settings of one training run."""

    predictor: str
    requests: str
    """Share of the training requests, or `200 prompts`."""
    width: int
    passes: int


@dataclass(frozen=True, kw_only=True)
class CeilingRow(TrainingRun):
    """Accuracy of one run at one prefetch distance."""

    train_tokens: int
    prompts: int
    horizon: int
    """Layers ahead."""
    mean_accuracy: float
    worst_layer_accuracy: float
    accuracy: list[float | None]
    """Accuracy of each layer; None where nothing is forecast."""

    @property
    def run(self) -> TrainingRun:
        return TrainingRun(
            predictor=self.predictor,
            requests=self.requests,
            width=self.width,
            passes=self.passes,
        )


UNTRAINED = TrainingRun(predictor="skip", requests="1", width=512, passes=0)
"""Without training, residual is skip: the row that all others are compared with."""


def list_runs() -> list[TrainingRun]:
    """Returns all training runs, the cheap ones first."""
    kinds = ("mlp", "residual")
    grid = [
        *((share, 512, passes) for passes in (1, 2, 4, 8)
          for share in ("1/8", "1/4", "200 prompts", "1/2", "1")),
        *(("1", width, passes) for passes in (2, 4, 8) for width in (128, 1024)),
        *((share, 512, 16) for share in ("1/8", "200 prompts", "1")),
    ]  # fmt: skip
    runs = [
        TrainingRun(predictor=kind, requests=share, width=width, passes=passes)
        for share, width, passes in grid
        for kind in kinds
    ]
    weight = {"200 prompts": 0.39, **SHARES}
    return sorted(runs, key=lambda run: (weight[run.requests] or 0) * run.passes * run.width)


class TrainingData:
    """The columns of a trace that the networks read, in memory, in half precision."""

    def __init__(self, trace: Trace):
        layers = range(trace.spec.num_layers)
        rows = np.arange(trace.num_tokens)
        self.trace = trace
        experts = [trace.column(TraceSignal.EXPERTS, layer)[:] for layer in layers]
        self.chosen_LNK = np.stack(experts).astype(np.int64)
        self.states: dict[TraceSignal, NDArray] = {}
        self.past: dict[TraceSignal, NDArray] = {}
        for signal in SIGNALS:
            # Only the first layer's input: it says which token it is.
            needed = layers if signal is TraceSignal.GATE_INPUT else layers[:1]
            columns = [trace.column(signal, layer) for layer in needed]
            self.states[signal] = np.stack([column[:] for column in columns])
            self.past[signal], self.weight_GN = read_contexts(
                columns, rows, requests=trace.requests, decays=DECAYS
            )

    def batch(self, take: NDArray[np.int64], *, past: bool) -> Batch:
        def tensor(array: NDArray) -> torch.Tensor:
            return torch.from_numpy(array[..., take, :].astype(np.float32))

        return Batch(
            torch.from_numpy(self.chosen_LNK[:, take]),
            {signal: tensor(state) for signal, state in self.states.items()},
            {signal: tensor(state) for signal, state in self.past.items()} if past else {},
            torch.from_numpy(self.weight_GN[:, take]) if past else None,
        )

    def rows(self, requests: str) -> NDArray[np.int64]:
        """Returns the rows of a nested subset of the training requests, chosen by digest."""
        train = [entry for entry in self.trace.request_table if entry.split is Split.TRAIN]
        train.sort(key=lambda entry: hashlib.sha256(f"ceiling {entry.digest}".encode()).hexdigest())
        share = SHARES.get(requests)
        count = COLD_REQUESTS if share is None else round(len(train) * share)
        kept = {entry.index for entry in train[:count]}
        return np.flatnonzero(np.isin(self.trace.requests, sorted(kept)))


def build_family(
    run: TrainingRun, trace: Trace, routers_LED: Floats, biases_LE: Floats | None
) -> PredictorStack:
    seed_everything(SEED, verbose=False)
    if run.predictor == "mlp":
        both = network_specs(trace.spec, ("mlp", "stride"))
        return PlainStack(trace.spec, both, width=run.width, loss="bce")
    return ResidualStack(trace.spec, routers_LED, biases_LE, horizons=HORIZONS, width=run.width)


def train(family: PredictorStack, data: TrainingData, rows: NDArray[np.int64], passes: int) -> None:
    """Trains in place, with the steps and the schedule of `python -m train`."""
    past = isinstance(family, ResidualStack)
    module = StackFit(
        [family],
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        total_steps=passes * (len(rows) // BATCH),
    )
    configured = module.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for step, take in enumerate(batches(rows, passes)):
        batch = data.batch(take, past=past)
        if not step:
            family.normalise_by(batch)
        optimizer.zero_grad()
        family.losses(batch).sum().backward()
        optimizer.step()
        schedule.step()


def batches(rows: NDArray[np.int64], passes: int) -> Iterator[NDArray[np.int64]]:
    for epoch in range(passes):
        left = len(rows) // BATCH
        for pool in shuffle_rows(rows, pool_rows=POOL_ROWS, seed=SEED, epoch=epoch):
            for first in range(0, len(pool) - BATCH + 1, BATCH):
                if left:
                    yield pool[first : first + BATCH]
                    left -= 1


@torch.no_grad()
def accuracies(
    family: PredictorStack, data: TrainingData, rows: NDArray[np.int64]
) -> dict[str, float]:
    """Returns the accuracy of each label over all held-out tokens."""
    past = isinstance(family, ResidualStack)
    hits, counts = torch.zeros(len(family.labels)), torch.zeros(len(family.labels))
    for first in range(0, len(rows), EVALUATED):
        batch = data.batch(rows[first : first + EVALUATED], past=past)
        batch_hits, batch_counts = family.hits(batch)
        hits, counts = hits + batch_hits, counts + batch_counts
    return dict(zip(family.labels, (hits / counts).tolist(), strict=True))


def group_by_horizon(
    accuracy: Mapping[str, float], num_layers: int
) -> dict[int, list[float | None]]:
    """Returns the accuracy of each layer for each horizon of 1 or more."""
    horizons: dict[int, list[float | None]] = {}
    for label, value in accuracy.items():
        group, _, layer = label.rpartition("/layer_")
        horizon = {"mlp": 1, "stride": 2, "residual/entry": -1}.get(group)
        if horizon is None:
            horizon = int(group.rpartition("_")[-1])
        if horizon > 0:
            horizons.setdefault(horizon, [None] * num_layers)[int(layer)] = value
    return horizons


def train_and_score(
    run: TrainingRun, data: TrainingData, routers: RouterWeights
) -> list[CeilingRow]:
    """Returns the rows of one run, one for each horizon."""
    trace = data.trace
    family = build_family(run, trace, routers.matrices_LED, routers.biases_LE)
    rows = data.rows(run.requests)
    if run.passes:
        train(family, data, rows, run.passes)
    horizons = group_by_horizon(
        accuracies(family, data, trace.rows("held_out")), trace.spec.num_layers
    )
    result = []
    for horizon, accuracy in horizons.items():
        known = [value for value in accuracy if value is not None]
        result.append(
            CeilingRow(
                **vars(run),
                train_tokens=len(rows) if run.passes else 0,
                prompts=len(np.unique(trace.requests[rows])) if run.passes else 0,
                horizon=horizon,
                mean_accuracy=float(np.mean(known)),
                worst_layer_accuracy=min(known),
                accuracy=accuracy,
            )
        )
    return result


def run_ceiling(config: CeilingConfig) -> None:
    torch.set_num_threads(config.threads)
    trace = Trace.open(config.trace)
    rows: list[CeilingRow] = []
    if config.output.exists():
        known = json.loads(config.output.read_bytes())
        if known["trace"] != trace.digest:
            raise MoecastError(f"output={config.output}: has rows of another trace")
        rows = [CeilingRow(**row) for row in known["rows"]]
    data = TrainingData(trace)
    composed, _ = compose_typed(TrainConfig, [f"model={trace.spec.model_id}"])
    routers = RouterWeights(composed.model, trace.spec)
    for run in (UNTRAINED, *list_runs()):
        if any(row.run == run for row in rows):
            continue
        new = train_and_score(run, data, routers)
        rows += new
        write_report(config, trace=trace.digest, dataset=trace.manifest.plan.dataset, rows=rows)
        for row in new:
            print_line(f"{run}: horizon {row.horizon}: {row.mean_accuracy:.4f}")
