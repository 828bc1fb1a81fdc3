"""How far forecasts of the reference model's routing can go: accuracy against tokens, size, time.

    python benchmarks/ceiling.py trace=runs/traces/qwen2-moe-tiny/NAME
        output=benchmarks/results/ceiling.json

Trains `residual` (its sources that look ahead) and the published `mlp` and `stride` again and
again on nested subsets of the trace's training requests, and scores the last pass's weights on all
held-out requests. A row is written as soon as it is known; rows that are there are not made again,
so an interrupted run goes on. The trace needs the signals layer_input, gate_input and experts. One
thread, 3 GB of memory, an hour or two. `only=KIND` and `passes=N` make a part of the rows.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import seed_everything
from numpy.typing import NDArray
from torch import nn

from collect.traces import Trace, TraceSignal
from collect.traces.layout import Split
from configs.compose import compose_typed
from predictors.base import Floats
from train.baselines import router_weights
from train.context import contexts
from train.data import Batch, shuffled
from train.family import Family
from train.module import StackFit
from train.networks import PlainFamily, edges
from train.pipeline import HORIZONS
from train.residual import DECAYS, ResidualFamily

BATCH, EVALUATED = 256, 1024
LR, WEIGHT_DECAY, SEED = 4e-3, 1e-2, 0
"""As `python -m train`."""
POOL_ROWS = 65_536
COLD_REQUESTS = 180
"""What the 9:1 split leaves of 200 prompts to train on."""
SHARES: Mapping[str, float | None] = {"1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "1": 1.0}
SIGNALS = (TraceSignal.LAYER_INPUT, TraceSignal.GATE_INPUT)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run."""

    predictor: str
    requests: str
    """Share of the training requests, or `200 prompts`."""
    width: int
    passes: int


def jobs() -> list[Job]:
    """The cheap ones first."""
    found = [
        Job(predictor=kind, requests=share, width=512, passes=passes)
        for passes in (1, 2, 4, 8)
        for share in ("1/8", "1/4", "200 prompts", "1/2", "1")
        for kind in ("mlp", "residual")
    ]
    found += [
        Job(predictor=kind, requests="1", width=width, passes=passes)
        for passes in (2, 4, 8)
        for width in (128, 1024)
        for kind in ("mlp", "residual")
    ]
    found += [
        Job(predictor=kind, requests=share, width=512, passes=passes)
        for share, passes in (("1/8", 16), ("200 prompts", 16), ("1", 16))
        for kind in ("mlp", "residual")
    ]
    weight = {"200 prompts": 0.39, **SHARES}
    return sorted(found, key=lambda job: (weight[job.requests] or 0) * job.passes * job.width)


class Memory:
    """What the networks read of a trace, in memory, half precision."""

    def __init__(self, trace: Trace):
        layers = range(trace.spec.num_layers)
        rows = np.arange(trace.num_tokens)
        self.trace = trace
        experts = [trace.column(TraceSignal.EXPERTS, layer)[:] for layer in layers]
        self.chosen_LNK = np.stack(experts).astype(np.int64)
        self.states: dict[TraceSignal, NDArray] = {}
        self.past: dict[TraceSignal, NDArray] = {}
        for signal in SIGNALS:
            # Of the layers' own inputs only the first: which token it is.
            mine = layers if signal is TraceSignal.GATE_INPUT else layers[:1]
            columns = [trace.column(signal, layer) for layer in mine]
            self.states[signal] = np.stack([column[:] for column in columns])
            self.past[signal], self.weight_GN = contexts(
                columns, rows, requests=trace.requests, decays=DECAYS
            )

    def batch(self, take: NDArray[np.int64], *, past: bool) -> Batch:
        def tensor(array: NDArray) -> torch.Tensor:
            return torch.from_numpy(array[..., take, :].astype(np.float32))

        return Batch(
            torch.from_numpy(self.chosen_LNK[:, take]),
            {signal: tensor(one) for signal, one in self.states.items()},
            {signal: tensor(one) for signal, one in self.past.items()} if past else {},
            torch.from_numpy(self.weight_GN[:, take]) if past else None,
        )

    def rows(self, requests: str) -> NDArray[np.int64]:
        """Rows of a nested subset of the training requests, by digest."""
        train = [one for one in self.trace.request_table if one.split is Split.TRAIN]
        train.sort(key=lambda one: hashlib.sha256(f"ceiling {one.digest}".encode()).hexdigest())
        share = SHARES.get(requests)
        count = COLD_REQUESTS if share is None else round(len(train) * share)
        kept = {one.index for one in train[:count]}
        return np.flatnonzero(np.isin(self.trace.requests, sorted(kept)))


def family_of(job: Job, trace: Trace, routers_LED: Floats, biases_LE: Floats | None) -> Family:
    seed_everything(SEED, verbose=False)
    if job.predictor == "mlp":
        both = edges(trace.spec, ("mlp", "stride"))
        return PlainFamily(trace.spec, both, width=job.width, loss="bce")
    family = ResidualFamily(trace.spec, routers_LED, biases_LE, horizons=HORIZONS, width=job.width)
    # Horizon 0 is another question, and half of the work.
    family.stacks = nn.ModuleList([family.stacks[0]])
    family.labels = list(family.stacks[0].labels)
    return family


def train(family: Family, memory: Memory, rows: NDArray[np.int64], passes: int) -> None:
    """In place, with the steps and the schedule of `python -m train`."""
    past = isinstance(family, ResidualFamily)
    module = StackFit(
        [family],
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        total_steps=passes * (len(rows) // BATCH),
    )
    chosen = module.configure_optimizers()
    optimizer, schedule = chosen["optimizer"], chosen["lr_scheduler"]["scheduler"]
    for step, take in enumerate(batches(rows, passes)):
        batch = memory.batch(take, past=past)
        if not step:
            family.normalise_by(batch)
        optimizer.zero_grad()
        family.losses(batch).sum().backward()
        optimizer.step()
        schedule.step()


def batches(rows: NDArray[np.int64], passes: int) -> Iterator[NDArray[np.int64]]:
    for epoch in range(passes):
        left = len(rows) // BATCH
        for pool in shuffled(rows, pool_rows=POOL_ROWS, seed=SEED, epoch=epoch):
            for first in range(0, len(pool) - BATCH + 1, BATCH):
                if left:
                    yield pool[first : first + BATCH]
                    left -= 1


@torch.no_grad()
def accuracies(family: Family, memory: Memory, rows: NDArray[np.int64]) -> dict[str, float]:
    """Of each label, over all held-out tokens."""
    past = isinstance(family, ResidualFamily)
    hits, counts = 0, 0
    for first in range(0, len(rows), EVALUATED):
        batch = memory.batch(rows[first : first + EVALUATED], past=past)
        found, wanted = family.hits(batch)
        hits, counts = hits + found, counts + wanted
    return dict(zip(family.labels, (hits / counts).tolist(), strict=True))


def by_horizon(found: Mapping[str, float], num_layers: int) -> dict[int, dict[str, Any]]:
    """Mean and worst layer of each horizon; the layers that it reaches."""
    horizons: dict[int, list[float | None]] = {}
    for label, value in found.items():
        group, _, layer = label.rpartition("/layer_")
        horizon = {"mlp": 1, "stride": 2, "residual/entry": -1}.get(group)
        if horizon is None:
            horizon = int(group.rpartition("_")[-1])
        if horizon > 0:
            horizons.setdefault(horizon, [None] * num_layers)[int(layer)] = value
    return {
        horizon: {
            "mean_accuracy": float(np.mean([one for one in values if one is not None])),
            "worst_layer_accuracy": min(one for one in values if one is not None),
            "accuracy": values,
        }
        for horizon, values in horizons.items()
    }


def rows_of(job: Job, memory: Memory, routers: tuple[Floats, Floats | None]) -> list[dict]:
    """The rows of one run, one for each horizon."""
    trace = memory.trace
    family = family_of(job, trace, *routers)
    rows = memory.rows(job.requests)
    if job.passes:
        train(family, memory, rows, job.passes)
    found = by_horizon(accuracies(family, memory, trace.rows("held_out")), trace.spec.num_layers)
    return [
        {
            **asdict(job),
            "train_tokens": len(rows) if job.passes else 0,
            "prompts": len(np.unique(trace.requests[rows])) if job.passes else 0,
            "horizon": horizon,
            **figures,
        }
        for horizon, figures in found.items()
    ]


def main(arguments: dict[str, str]) -> None:
    torch.set_num_threads(int(arguments.get("threads", "1")))
    output = Path(arguments["output"])
    trace = Trace.open(Path(arguments["trace"]))
    report: dict[str, Any] = {"trace": trace.digest, "dataset": trace.manifest.plan.dataset}
    rows: list[dict[str, Any]] = []
    if output.exists():
        rows = json.loads(output.read_text())["rows"]
    memory = Memory(trace)
    config, _ = compose_typed("train", [f"model={trace.spec.model_id}"])
    routers = router_weights(config.model, trace.spec)
    have = {tuple(row[key] for key in asdict(jobs()[0])) for row in rows}
    # Untrained, residual is skip: the row that all others stand on.
    wanted = [Job(predictor="skip", requests="1", width=512, passes=0), *jobs()]
    if "only" in arguments:
        wanted = [job for job in wanted if job.predictor == arguments["only"]]
    if "passes" in arguments:
        wanted = [job for job in wanted if job.passes <= int(arguments["passes"])]
    for job in wanted:
        if tuple(asdict(job).values()) in have:
            continue
        rows += rows_of(job, memory, routers)
        part = output.with_suffix(".part")
        part.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")
        part.replace(output)
        for row in rows:
            if all(row[key] == value for key, value in asdict(job).items()):
                shown = f"horizon {row['horizon']}: {row['mean_accuracy']:.4f}"
                sys.stdout.write(f"{asdict(job)} {shown}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(dict(one.split("=", 1) for one in sys.argv[1:]))
