"""Measures the decode steps of plain Transformers and of systems in turns, in one process."""

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.control_plane.sections import StepProfiler, measure_event
from runtime.config import ModelConfig, PageCache, StoreConfig, SystemConfig
from runtime.engine.engine import Engine
from runtime.engine.loading import LoadOptions, load_model
from runtime.engine.memory import freeze_objects
from runtime.hf.layers import find_moe_layers
from runtime.policy.budget import Budget
from runtime.tools.bench.config import BenchConfig
from runtime.tools.bench.serve import read_counters, require_predictor
from runtime.tools.verify.reference import load_plain_model

PLAIN = "plain Transformers"
ALL = "100%"
"""Budget at which every expert is in memory from the beginning."""
PROMPT_TOKENS = 64
WARM_UP_STEPS = 8
NOTHING = nullcontext()
SETTLE_SECONDS = 0.02
"""Time after a turn in which prefetches that it began may end."""


@dataclass(frozen=True, kw_only=True)
class ControlPlaneTask:
    """Measure these systems at this budget."""

    model: ModelConfig
    entries: Path
    budget: str
    system: Sequence[SystemConfig]
    turns: int
    steps: int
    """Decode steps of a turn."""
    threads: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class ControlPlaneRow:
    """One contender: medians over the turns. Sections and calls are per layer and token."""

    system: str
    tpot_seconds: float
    over_plain: float
    """Median of the ratios to plain Transformers' TPOT in the same turn."""
    added_seconds_per_layer: float
    """Median difference to plain Transformers' TPOT in the same turn."""
    hit_rate: float | None
    other_threads_seconds: float
    """Processor time of the transfers' threads."""
    section_seconds: dict[str, float]
    """Time on the model's thread, medians over the steps of a pass that profiles."""
    sections_over_tpot: float
    """Sum of the sections over the TPOT: 1 if profiling changed nothing."""
    calls: float
    """Calls of this project's functions on the model's thread."""
    same_tokens: bool
    """Whether the most likely tokens were plain Transformers'."""


@dataclass(eq=False)
class Contender:
    """A loaded model that decodes the same tokens as the others."""

    name: str
    model: PreTrainedModel
    engine: Engine | None
    cache: DynamicCache = field(default_factory=DynamicCache)
    answers: list[int] = field(default_factory=list)
    """Most likely token after each step."""
    turn_seconds: list[float] = field(default_factory=list)
    """Median time of a step in each turn."""
    other_threads: list[float] = field(default_factory=list)
    """Processor time of a step on other threads in each turn."""

    def step(
        self, tokens: Sequence[int], within: AbstractContextManager[object] = NOTHING
    ) -> float:
        """Run one forward pass within a context; return its time."""
        ids = torch.tensor([tokens])
        with within:
            start = time.perf_counter()
            logits: Tensor = self.model(ids, past_key_values=self.cache, use_cache=True).logits
            end = time.perf_counter()
        self.answers.append(int(logits[0, -1].argmax()))
        return end - start

    def run_turn(self, tokens: Sequence[int]) -> None:
        before = read_other_threads()
        seconds = [self.step([token]) for token in tokens]
        time.sleep(SETTLE_SECONDS)
        self.turn_seconds.append(statistics.median(seconds))
        self.other_threads.append((read_other_threads() - before) / len(tokens))


def read_other_threads() -> float:
    """Return the processor time of all Python threads but this one."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None and thread is not threading.current_thread()
    )


def load_contenders(task: ControlPlaneTask) -> list[Contender]:
    """Load plain Transformers first, then each system.

    Raises:
        MoecastError: a system's predictor is missing.
    """
    contenders = [Contender(PLAIN, load_plain_model(task.model, torch.device("cpu")), None)]
    config = BenchConfig(model=task.model, entries=task.entries, system=list(task.system))
    for system in task.system:
        model = load_model(
            LoadOptions(
                model=task.model,
                # Prefetching that turns itself off would measure now one thing, now another.
                system=replace(system, fill_first_layers=task.budget == ALL, adaptive=False),
                budget=Budget.parse(task.budget),
                entries=task.entries,
                # What matters here is not the disk.
                store=StoreConfig(page_cache=PageCache.KEEP),
            )
        )
        require_predictor(config, system, model.moecast.engine)
        contenders.append(Contender(system.name, model, model.moecast.engine))
    return contenders


def plain_sections(model: PreTrainedModel) -> dict[CodeType, str]:
    """Return the function of plain Transformers that computes experts one by one."""
    forward = type(find_moe_layers(model)[0].experts).forward
    return {getattr(forward, "__wrapped__", forward).__code__: "experts function"}


@torch.no_grad()
def run_control_plane_task(task: ControlPlaneTask) -> list[dict[str, Any]]:
    """Measure all contenders and return a `ControlPlaneRow` of each as a dictionary."""
    torch.set_num_threads(task.threads)
    contenders = load_contenders(task)
    freeze_objects()
    random = np.random.default_rng(task.seed)
    vocabulary = contenders[0].model.config.vocab_size

    def draw(number: int) -> list[int]:
        return random.integers(1, vocabulary, number).tolist()

    prompt, warm_up = draw(PROMPT_TOKENS), draw(WARM_UP_STEPS)
    for contender in contenders:
        contender.step(prompt)
        for token in warm_up:
            contender.step([token])
    before = {c.name: read_counters(c.engine) for c in contenders if c.engine is not None}
    for turn in range(task.turns):
        tokens, first = draw(task.steps), turn % len(contenders)
        # Each begins a round in turn, so that none always comes after the same one.
        for contender in contenders[first:] + contenders[:first]:
            contender.run_turn(tokens)
    after = {c.name: read_counters(c.engine) for c in contenders if c.engine is not None}
    event_seconds, tokens = measure_event(), draw(task.steps)
    rows = []
    for contender in contenders:
        profiler = StepProfiler(plain_sections(contenders[0].model))
        steps = []
        for token in tokens:
            contender.step([token], profiler)
            steps.append(profiler.take_seconds(event_seconds))
        row = describe_contender(
            contender,
            contenders[0],
            steps,
            num_calls=sum(profiler.calls().values()),
            counters=(before.get(contender.name), after.get(contender.name)),
        )
        rows.append(asdict(row))
    for contender in contenders[1:]:
        contender.model.moecast.close()
    return rows


def describe_contender(
    contender: Contender,
    plain: Contender,
    steps: Sequence[Mapping[str, float]],
    *,
    num_calls: int,
    counters: tuple[Mapping[str, float] | None, Mapping[str, float] | None],
) -> ControlPlaneRow:
    num_layers = len(find_moe_layers(contender.model))
    pairs = list(zip(contender.turn_seconds, plain.turn_seconds, strict=True))
    tpot = statistics.median(contender.turn_seconds)
    sections = {
        name: statistics.median(step[name] for step in steps) / num_layers for name in steps[0]
    }
    start, end = counters
    hit_rate = None
    if start is not None and end is not None:
        hit_rate = (end["hits"] - start["hits"]) / (end["requests"] - start["requests"])
    return ControlPlaneRow(
        system=contender.name,
        tpot_seconds=tpot,
        over_plain=statistics.median(own / other for own, other in pairs),
        added_seconds_per_layer=statistics.median(own - other for own, other in pairs) / num_layers,
        hit_rate=hit_rate,
        other_threads_seconds=statistics.median(contender.other_threads) / num_layers,
        section_seconds=sections,
        sections_over_tpot=num_layers * sum(sections.values()) / tpot,
        calls=num_calls / len(steps) / num_layers,
        same_tokens=contender.answers == plain.answers,
    )
