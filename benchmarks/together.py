"""Training the networks of all layers together, against one after another.

    python benchmarks/together.py trace=runs/traces/qwen2-moe-tiny/NAME
        output=benchmarks/results/together.json

The published networks, `mlp` and `stride`, one for each layer that has a target. Both ways begin at
the same weights and see the same tokens in the same order, so that they end at the same accuracy.

in process: one program trains them all in one step, or each in its turn; each way reads only the
columns that it needs, once, and then trains from memory. as commands: a process for all of them
together, or a process for each, as somebody does who has a script that trains one network: starting
Python, opening the trace (every byte is hashed) and reading are paid each time.

To be run alone; one thread unless threads=N; 5 to 10 minutes. `passes=1`, `repetitions=3` (of what
is in process; medians), `networks=N` and `tokens=N` for the first so many only.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from lightning.pytorch import seed_everything
from numpy.typing import NDArray

from collect.traces import Trace, TraceSignal
from train.data import Batch, shuffled
from train.module import StackFit
from train.networks import Edge, PlainFamily, edges

KINDS = ("mlp", "stride")
BATCH, WIDTH, LR, WEIGHT_DECAY, SEED = 256, 512, 4e-3, 1e-2, 0
"""As `python -m train`."""
POOL_ROWS, EVALUATED = 65_536, 2_048


def columns(trace: Trace, of: Sequence[Edge], rows: NDArray[np.int64]) -> tuple[NDArray, NDArray]:
    """States `[N, rows, D]` and choices `[N, rows, K]` of the layers that these networks read and
    forecast, each layer once."""
    sources, targets = layers_of(of)
    states = [trace.column(TraceSignal.GATE_INPUT, layer)[rows] for layer in sources]
    chosen = [trace.column(TraceSignal.EXPERTS, layer)[rows] for layer in targets]
    return np.stack(states), np.stack(chosen).astype(np.int64)


def layers_of(of: Sequence[Edge]) -> tuple[list[int], list[int]]:
    return sorted({one.source for one in of}), sorted({one.target for one in of})


def batch_of(read: tuple[NDArray, NDArray], take: NDArray[np.int64]) -> Batch:
    states, chosen = read
    return Batch(
        torch.from_numpy(chosen[:, take]),
        {TraceSignal.GATE_INPUT: torch.from_numpy(states[:, take].astype(np.float32))},
    )


def begun(trace: Trace, every: Sequence[Edge], of: Sequence[Edge]) -> PlainFamily:
    """These networks as they begin among all of them, numbered by place in what is read."""
    seed_everything(SEED, verbose=False)
    whole = PlainFamily(trace.spec, every, width=WIDTH, loss="bce")
    sources, targets = layers_of(of)
    placed = [
        replace(one, source=sources.index(one.source), target=targets.index(one.target))
        for one in of
    ]
    family = PlainFamily(trace.spec, placed, width=WIDTH, loss="bce")
    places = [list(every).index(one) for one in of]
    own = dict(family.stack.named_parameters())
    with torch.no_grad():
        for name, value in whole.stack.named_parameters():
            own[name].copy_(value[places])
    return family


def train(
    trace: Trace, every: Sequence[Edge], of: Sequence[Edge], passes: int, tokens: int | None
) -> tuple[float, list[float]]:
    """Seconds of reading and training, and each network's accuracy on held-out requests."""
    family = begun(trace, every, of)
    started = time.perf_counter()
    rows = trace.rows("train")[:tokens]
    read = columns(trace, of, rows)
    module = StackFit(
        [family], lr=LR, weight_decay=WEIGHT_DECAY, total_steps=passes * (len(rows) // BATCH)
    )
    chosen = module.configure_optimizers()
    optimizer, schedule = chosen["optimizer"], chosen["lr_scheduler"]["scheduler"]
    fresh = True
    for epoch in range(passes):
        for pool in shuffled(np.arange(len(rows)), pool_rows=POOL_ROWS, seed=SEED, epoch=epoch):
            for first in range(0, len(pool) - BATCH + 1, BATCH):
                batch = batch_of(read, pool[first : first + BATCH])
                if fresh:
                    family.normalise_by(batch)
                    fresh = False
                optimizer.zero_grad()
                family.losses(batch).sum().backward()
                optimizer.step()
                schedule.step()
    seconds = time.perf_counter() - started
    held = columns(trace, of, trace.rows("held_out"))
    found = [
        family.hits(batch_of(held, np.arange(first, min(first + EVALUATED, held[0].shape[1]))))
        for first in range(0, held[0].shape[1], EVALUATED)
    ]
    hits, counts = (sum(part) for part in zip(*found, strict=True))
    return seconds, (hits / counts).tolist()


def in_process(
    trace: Trace, every: Sequence[Edge], repetitions: int, **how: int | None
) -> dict[str, Any]:
    together, alone, accuracy = [], [], ([0.0], [0.0])
    for _ in range(repetitions):
        seconds, whole = train(trace, every, every, **how)
        together.append(seconds)
        each = [train(trace, every, [one], **how) for one in every]
        alone.append(sum(seconds for seconds, _ in each))
        accuracy = (whole, [value for _, values in each for value in values])
    return row("in process", together, alone) | {
        "mean_accuracy_together": float(np.mean(accuracy[0])),
        "mean_accuracy_one_by_one": float(np.mean(accuracy[1])),
        "largest_difference": float(np.abs(np.subtract(*accuracy)).max()),
    }


def as_commands(arguments: dict[str, str], every: Sequence[Edge]) -> dict[str, Any]:
    def run(places: Sequence[int]) -> float:
        own = {**arguments, "of": ",".join(map(str, places))}
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, __file__, *(f"{key}={value}" for key, value in own.items())],
            check=True,
        )
        return time.perf_counter() - started

    together = run(range(len(every)))
    return row("as commands", [together], [sum(run([one]) for one in range(len(every)))])


def row(how: str, together: list[float], alone: list[float]) -> dict[str, Any]:
    return {
        "how": how,
        "together_seconds": round(median(together), 2),
        "one_by_one_seconds": round(median(alone), 2),
        "ratio": round(median(alone) / median(together), 2),
        "repetitions": len(together),
    }


def main(arguments: dict[str, str]) -> None:
    torch.set_num_threads(int(arguments.get("threads", "1")))
    tokens = int(arguments["tokens"]) if "tokens" in arguments else None
    how = {"passes": int(arguments.get("passes", "1")), "tokens": tokens}
    trace = Trace.open(Path(arguments["trace"]))
    every = edges(trace.spec, KINDS)
    every = every[: int(arguments.get("networks", len(every)))]
    if "of" in arguments:
        train(trace, every, [every[int(one)] for one in arguments["of"].split(",")], **how)
        return
    rows = [
        in_process(trace, every, int(arguments.get("repetitions", "3")), **how),
        as_commands(arguments, every),
    ]
    report = {
        "trace": trace.digest,
        "tokens": len(trace.rows("train")[:tokens]),
        "networks": len(every),
        "passes": how["passes"],
        "threads": torch.get_num_threads(),
        "rows": rows,
    }
    Path(arguments["output"]).write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(json.dumps(report["rows"], indent=1) + "\n")


if __name__ == "__main__":
    main(dict(one.split("=", 1) for one in sys.argv[1:]))
