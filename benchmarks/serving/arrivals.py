"""A public trace's arrivals replayed on systems in turn: how latency is distributed.

    python -m runtime inflate total_size=2GiB output=runs/inflated
    python -m benchmarks.serving.arrivals trace=AzureLLMInferenceTrace_conv.csv model=runs/inflated

`requests=32` of the trace in a row (`seed=0` says which), their lengths scaled to means of
`prompt_tokens=48` and `new_tokens=16`; prompts are pieces of the standard library's source, which
nothing was trained on. The first system answers six of them one after another; the rate is
`load=0.8` of what it could answer so, or `rate=R` requests a second. Every system gets the same
requests at the same times: `systems=on-demand,promoe,moe-infinity-request,fmoe,moecast`,
`budget=25%`; with `repetitions=2` in turns, and all answers of a system are put together. The page
with the distributions, their PNGs and CSVs go to `folder=runs/serving/arrivals`.
"""

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from transformers import AutoTokenizer

from benchmarks.serving.distributions import page_of
from benchmarks.serving.replay import Answer, one_by_one, replay
from benchmarks.serving.results import here, keep
from benchmarks.serving.server import Server, server
from benchmarks.serving.trace import LONGEST, Arrival, read, scaled, window
from collect.config import DataConfig, SourceKind
from collect.prompts import load_prompts
from runtime.config import ModelConfig
from runtime.store.model_source import resolve

SYSTEMS = "on-demand,promoe,moe-infinity-request,fmoe,moecast"
PROBES = 6
"""Requests of the trace that tell how long one takes alone."""
SHARES = (50, 90, 99)
COUNTERS = {
    "hits": "moecast_expert_cache_hits_total",
    "joins": "moecast_expert_cache_joins_total",
    "misses": "moecast_expert_cache_misses_total",
    "bytes": "moecast_expert_bytes_total",
    "stall_seconds": "moecast_stall_seconds_total",
}


def texts(folder: Path, number: int, longest: int, seed: int) -> list[list[int]]:
    """Token ids of so many different pieces, each at least as long as needed."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    data = DataConfig(
        name="pysource",
        kind=SourceKind.PYSOURCE,
        num_prompts=4 * number,
        max_prompt_tokens=2 * longest,
    )
    tokens = [list(tokenizer(one.text)["input_ids"]) for one in load_prompts(data, seed=seed)]
    long_enough = [one for one in tokens if len(one) >= longest]
    assert len(long_enough) >= number, f"{len(long_enough)} of {number} prompts are long enough"
    return long_enough[:number]


def cut(arrivals: Sequence[Arrival], prompts: Sequence[list[int]]) -> list[list[int]]:
    return [prompt[: one.prompt_tokens] for one, prompt in zip(arrivals, prompts, strict=True)]


@dataclass
class Arm:
    """One system, over all repetitions."""

    answers: list[Answer] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    """Seconds a request took, of each repetition."""
    counted: Counter[str] = field(default_factory=Counter)

    def add(self, answers: list[Answer], counted: Mapping[str, float]) -> None:
        self.answers += answers
        self.means.append(float(np.mean([one.e2e_seconds for one in answers])))
        self.counted.update(counted)

    @property
    def said(self) -> tuple[str, ...]:
        return tuple(one.text for one in self.answers)

    def summary(self) -> dict[str, Any]:
        """Means and percentiles, and every request's own figures, in seconds."""
        found: dict[str, Any] = {"mean_of_each_repetition": self.means}
        for name in ("e2e_seconds", "ttft_seconds", "tpot_seconds"):
            values = [value for one in self.answers if (value := getattr(one, name)) is not None]
            found[name] = {
                "mean": float(np.mean(values)),
                **{f"p{share}": float(np.percentile(values, share)) for share in SHARES},
                "all": [round(value, 4) for value in values],
            }
        count = self.counted
        asked = count["hits"] + count["joins"] + count["misses"]
        return found | {"counted": {**count, "hit_rate": count["hits"] / asked}}


def run(
    target: Server,
    arrivals: Sequence[Arrival],
    prompts: Sequence[list[int]],
    warm: Sequence[list[int]],
) -> tuple[list[Answer], dict[str, float]]:
    """Warms up and replays; what was answered, and what was counted meanwhile."""
    waiting = [Arrival(0.0, len(prompt), 4) for prompt in warm]
    asyncio.run(one_by_one(target.url, waiting, warm))
    before = target.metrics()
    answers = asyncio.run(replay(target.url, arrivals, prompts))
    after = target.metrics()
    return answers, {name: after[key] - before.get(key, 0.0) for name, key in COUNTERS.items()}


def main(arguments: dict[str, str]) -> None:
    described = here()
    console = Console(highlight=False, soft_wrap=True)
    told = arguments.get
    number, seed = int(told("requests", "32")), int(told("seed", "0"))
    means = {name: float(told(name, mean)) for name, mean in
             {"prompt_tokens": "48", "new_tokens": "16"}.items()}  # fmt: skip
    options: dict[str, Any] = {"budget": told("budget", "25%"), "max_waiting": number}
    model = ModelConfig(id=arguments["model"]) if "model" in arguments else ModelConfig()
    if "model" in arguments:
        options["model.id"] = arguments["model"]
    found = window(read(Path(arguments["trace"])), number, seed=seed)
    longest = round(LONGEST * max(means.values()))
    every = texts(resolve(model), number + 2, longest, seed)
    pieces, warm = every[:number], [one[: round(means["prompt_tokens"])] for one in every[number:]]
    rate = float(arguments["rate"]) if "rate" in arguments else None
    names, repetitions = told("systems", SYSTEMS).split(","), int(told("repetitions", "1"))
    arms = {name: Arm() for name in names}
    for repetition, name in itertools.product(range(repetitions), names):
        with server(options | {"system": name}) as target:
            if rate is None:
                probes = scaled(found, rate=1.0, **means)[:PROBES]
                alone = asyncio.run(one_by_one(target.url, probes, cut(probes, pieces[:PROBES])))
                mean = float(np.mean([one.e2e_seconds for one in alone]))
                rate = float(told("load", "0.8")) / mean
                console.print(f"alone {mean:.2f} s a request: {rate:.3f} requests a second")
            arrivals = scaled(found, rate=rate, **means)
            arms[name].add(*run(target, arrivals, cut(arrivals, pieces), warm))
        mean = arms[name].means[-1]
        console.print(f"{repetition + 1}/{repetitions} {name}: {mean:.2f} s a request")
    results = {
        "trace": Path(arguments["trace"]).name,
        "requests": number,
        "repetitions": repetitions,
        "rate": rate,
        "budget": options["budget"],
        "model": Path(arguments["model"]).name if "model" in arguments else model.name,
        "arrivals": [asdict(one) for one in arrivals],
        "same_answers": len({arm.said for arm in arms.values()}) == 1,
        "systems": {name: arm.summary() for name, arm in arms.items()},
    }
    page = page_of(results).write(Path(told("folder", "runs/serving/arrivals")))
    # Where the trace lies is nobody's business but its owner's.
    named = {key: Path(value).name if key == "trace" else value for key, value in arguments.items()}
    keep("arrivals", results, named, described)
    console.print(f"{page}")


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
