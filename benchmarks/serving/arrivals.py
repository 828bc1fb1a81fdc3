"""A public trace's arrivals replayed on systems in turn: the distribution of latency.

Successive requests of the trace have their lengths scaled; prompts are pieces of the standard
library's source, which nothing was trained on. The first system answers six of them one after
another, which gives the rate. Every system gets the same requests at the same times; with several
repetitions all answers of a system are pooled.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from benchmarks.reports import describe_machine, print_line, write_part
from benchmarks.serving.config import ArrivalsConfig
from benchmarks.serving.replay import TimedCompletion, replay_arrivals, send_one_by_one
from benchmarks.serving.rows import Arrival, CacheCounts, Percentiles, SystemLatencies
from benchmarks.serving.server import ServerProcess, run_server
from benchmarks.serving.trace import LONGEST, choose_window, read_arrivals, scale_arrivals
from collect.config import DataConfig, SourceKind
from collect.prompts import load_prompts
from runtime.config import ModelConfig
from runtime.store.model_source import resolve

PROBES = 6
"""Requests that measure the time of one alone."""
COUNTERS = {
    "hits": "moecast_expert_cache_hits_total",
    "joins": "moecast_expert_cache_joins_total",
    "misses": "moecast_expert_cache_misses_total",
    "bytes": "moecast_expert_bytes_total",
    "stall_seconds": "moecast_stall_seconds_total",
}


def load_texts(folder: Path, number: int, longest: int, seed: int) -> list[list[int]]:
    """Returns token ids of different texts, each of at least `longest` tokens."""
    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    data = DataConfig(
        name="pysource",
        kind=SourceKind.PYSOURCE,
        num_prompts=4 * number,
        max_prompt_tokens=2 * longest,
    )
    texts = [list(tokenizer(prompt)["input_ids"]) for prompt in load_prompts(data, seed=seed)]
    long_enough = [tokens for tokens in texts if len(tokens) >= longest]
    assert len(long_enough) >= number, f"got {len(long_enough)} long texts, expected {number}"
    return long_enough[:number]


def cut_prompts(arrivals: Sequence[Arrival], texts: Sequence[list[int]]) -> list[list[int]]:
    """Cuts each text to the length of its arrival's prompt."""
    return [text[: arrival.prompt_tokens] for arrival, text in zip(arrivals, texts, strict=True)]


def summarize_latencies(values: Sequence[float]) -> Percentiles:
    p50, p90, p99 = (float(np.percentile(values, share)) for share in (50, 90, 99))
    return Percentiles(
        mean=float(np.mean(values)),
        p50=p50,
        p90=p90,
        p99=p99,
        all=[round(value, 4) for value in values],
    )


@dataclass
class SystemRuns:
    """The answers of one system over all repetitions."""

    answers: list[TimedCompletion] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    """Mean end-to-end seconds of each repetition."""
    counted: Counter[str] = field(default_factory=Counter)

    def add(self, answers: list[TimedCompletion], counted: Mapping[str, float]) -> None:
        """Adds a repetition."""
        self.answers += answers
        self.means.append(float(np.mean([answer.e2e_seconds for answer in answers])))
        self.counted.update(counted)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(answer.text for answer in self.answers)

    def summarize(self) -> SystemLatencies:
        count = self.counted
        requests = count["hits"] + count["joins"] + count["misses"]
        tpots = [answer.tpot_seconds for answer in self.answers]
        return SystemLatencies(
            mean_of_each_repetition=self.means,
            e2e_seconds=summarize_latencies([answer.e2e_seconds for answer in self.answers]),
            ttft_seconds=summarize_latencies([answer.ttft_seconds for answer in self.answers]),
            tpot_seconds=summarize_latencies([tpot for tpot in tpots if tpot is not None]),
            counted=CacheCounts(**count, hit_rate=count["hits"] / requests),
        )


def replay_on(
    target: ServerProcess,
    arrivals: Sequence[Arrival],
    prompts: Sequence[list[int]],
    warm_up: Sequence[list[int]],
) -> tuple[list[TimedCompletion], dict[str, float]]:
    """Warms up and replays; returns the answers, and what the counters grew by."""
    warm_up_arrivals = [Arrival(0.0, len(prompt), 4) for prompt in warm_up]
    asyncio.run(send_one_by_one(target.url, warm_up_arrivals, warm_up))
    before = target.metrics()
    answers = asyncio.run(replay_arrivals(target.url, arrivals, prompts))
    after = target.metrics()
    return answers, {name: after[key] - before.get(key, 0.0) for name, key in COUNTERS.items()}


def run_arrivals(config: ArrivalsConfig) -> None:
    machine = describe_machine()
    means = {"prompt_tokens": config.mean_prompt_tokens, "new_tokens": config.mean_new_tokens}
    options = {"budget": config.budget, "max_waiting": config.requests}
    model = ModelConfig()
    if config.model is not None:
        model = ModelConfig(id=str(config.model))
        options["model.id"] = str(config.model.absolute())  # the server has its own folder
    window = choose_window(read_arrivals(config.trace), config.requests, seed=config.seed)
    longest = round(LONGEST * max(means.values()))
    texts = load_texts(resolve(model), config.requests + 2, longest, config.seed)
    texts, spare = texts[: config.requests], texts[config.requests :]
    warm_up = [text[: round(config.mean_prompt_tokens)] for text in spare]
    rate: float | None = None
    arrivals: list[Arrival] = []
    systems = {name: SystemRuns() for name in config.system}
    for repetition, name in itertools.product(range(config.repetitions), config.system):
        with run_server(options | {"system": name}) as target:
            if rate is None:
                probes = scale_arrivals(window, rate=1.0, **means)[:PROBES]
                prompts = cut_prompts(probes, texts[:PROBES])
                alone = asyncio.run(send_one_by_one(target.url, probes, prompts))
                mean = float(np.mean([answer.e2e_seconds for answer in alone]))
                rate = config.load / mean
                print_line(f"alone {mean:.2f} s per request: {rate:.3f} requests/s")
            arrivals = scale_arrivals(window, rate=rate, **means)
            systems[name].add(*replay_on(target, arrivals, cut_prompts(arrivals, texts), warm_up))
        mean = systems[name].means[-1]
        print_line(f"{repetition + 1}/{config.repetitions} {name}: {mean:.2f} s per request")
    assert rate is not None
    write_part(
        config,
        "arrivals",
        machine=machine,
        trace=config.trace.name,
        rate=rate,
        model=config.model.name if config.model else model.name,
        arrivals=arrivals,
        same_answers=len({runs.texts for runs in systems.values()}) == 1,
        systems={name: runs.summarize() for name, runs in systems.items()},
    )
