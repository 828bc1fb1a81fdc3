"""Latency of every kind of predictor, for the shape of each published model.

Weights and states are random, of networks in int8 as they are trained by default; collections and
stores are full. A latency is the processor time of all calls of a step, its beginning and end
included, divided by the number of calls that forecast. Replays charge predictors these figures
(`runtime/sim/hardware.py`).
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.config import LatencyConfig
from benchmarks.papers.paper_context import describe_model, load_shape
from benchmarks.reports import describe_machine, print_line, write_report
from predictors.base import Floats, Forecasts, Ints, Predictor, Signal
from predictors.baselines import (
    DependencyPredictor,
    PopularityPredictor,
    SkipPredictor,
    TokenPredictor,
)
from predictors.config import PredictorConfig
from predictors.correlation import CorrelationPredictor
from predictors.eam.request import EamRequestPredictor
from predictors.eam.sequence import EamSequencePredictor
from predictors.expert_map import ExpertMapPredictor
from predictors.learned import MlpPredictor
from predictors.registry import FEED_FORWARD
from predictors.spec import ModelSpec
from runtime.config import ShapeConfig
from runtime.sim.hardware import TokenLatency
from train.export import network_graph, quantise
from train.pipeline import HORIZONS
from train.residual import ResidualStack
from train.reuse import ReuseStack

PROMPT_TOKENS = 64
DECODE_STEPS = 12
"""Decode steps after each prompt."""
IDS = 1_000
"""Token ids in the table of `token`."""

REFERENCE_SHAPE = ShapeConfig(
    name="reference", num_layers=12, num_experts=60, top_k=4, hidden_size=256
)
"""The model that this repository contains."""

SHAPES = (
    "deepseek-moe",
    "qwen1.5-moe",
    "qwen2-moe",
    "mixtral-8x7b",
    "phi-3.5-moe",
    "mixtral-8x22b",
    "arctic",
    "nllb-moe",
    "switch-base-128",
)


@dataclass(frozen=True, kw_only=True)
class ShapeRow:
    """Latencies for one shape."""

    num_layers: int
    hidden_size: int
    num_experts: int
    """Experts of all layers together."""
    kinds: Mapping[str, TokenLatency]


class RandomStep:
    """Signals of one forward pass of random numbers."""

    def __init__(
        self, spec: ModelSpec, random: np.random.Generator, *, num_tokens: int, request: int
    ) -> None:
        self.logits_TE: Floats = random.standard_normal((num_tokens, spec.num_experts), np.float32)
        self.tokens_T: Ints = random.integers(0, IDS, num_tokens)
        self.requests_T: Ints = np.full(num_tokens, request)
        self.hidden_TD: Floats = random.standard_normal((num_tokens, spec.hidden_size), np.float32)
        self.experts_TK: Ints = np.argsort(-self.logits_TE, axis=1)[:, : spec.top_k]


def run_latency(config: LatencyConfig) -> None:
    machine = describe_machine(threads=1)
    torch.set_num_threads(1)
    shapes = {}
    for shape in (REFERENCE_SHAPE, *map(load_shape, SHAPES)):
        kinds = {}
        for kind, make in predictor_makers(describe_model(shape)).items():
            predictor = make()
            kinds[kind] = measure_kind(predictor, repetitions=config.repetitions)
            print_line(f"{shape.name} {kind}: {kinds[kind]}")
        kinds |= dict.fromkeys(FEED_FORWARD, kinds["mlp"])
        shapes[shape.name] = ShapeRow(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_experts=shape.num_layers * shape.num_experts,
            kinds=kinds,
        )
    write_report(config, machine=machine, shapes=shapes)


def predictor_makers(spec: ModelSpec) -> dict[str, Callable[[], Predictor]]:
    """Returns a constructor of each kind, with random weights and everything stored.

    `mlp` stands for all kinds with the same network.
    """
    random = np.random.default_rng(0)
    layers, experts, hidden = spec.num_layers, spec.num_experts, spec.hidden_size

    def counts(number: int) -> Floats:
        return random.integers(0, 9, (number, layers, experts)).astype(np.float32)

    def normal(*shape: int) -> Floats:
        return random.standard_normal(shape, np.float32)

    def mlp() -> Predictor:
        width = PredictorConfig().width
        graphs = {
            source: network_graph(
                normal(hidden, width), normal(width), normal(width, experts), normal(experts),
                name=f"mlp_{source}",
            )
            for source in range(layers - MlpPredictor.horizon)
        }  # fmt: skip
        return quantise(MlpPredictor(spec, graphs))

    def residual() -> Predictor:
        stack = ResidualStack(spec, normal(layers, experts, hidden), None, horizons=HORIZONS)
        return quantise(stack.export(spec)["residual"])

    def reuse() -> Predictor:
        return quantise(ReuseStack(spec).export(spec)["reuse"])

    shares_SLE = random.random((IDS, layers, experts)).astype(np.float16)
    return {
        "mlp": mlp,
        "residual": residual,
        "reuse": reuse,
        "skip": lambda: SkipPredictor(spec, normal(layers, experts, hidden)),
        "token": lambda: TokenPredictor(spec, np.arange(IDS), shares_SLE, counts(1)[0]),
        "popularity": lambda: PopularityPredictor(spec, counts(1)[0], ahead=1),
        "dependency": lambda: DependencyPredictor(spec),
        "eam-sequence": lambda: EamSequencePredictor(spec, counts(128)),
        "eam-request": lambda: EamRequestPredictor(spec, counts(128)),
        "expert-map": lambda: ExpertMapPredictor(
            spec,
            random.dirichlet(np.ones(experts), (1_000, layers)).astype(np.float32),
            normal(1_000, hidden),
        ),
        "correlation": lambda: CorrelationPredictor(
            spec, np.ones((layers, experts, experts), np.float32), counts(1)[0]
        ),
    }  # fmt: skip


def measure_kind(predictor: Predictor, *, repetitions: int) -> TokenLatency:
    """Measures the shortest step of `repetitions` requests: other processes only add time."""
    seconds: dict[int, list[float]] = {PROMPT_TOKENS: [], 1: []}
    random = np.random.default_rng(0)
    for request in range(repetitions):
        for num_tokens in (PROMPT_TOKENS, *[1] * DECODE_STEPS):
            step = RandomStep(predictor.spec, random, num_tokens=num_tokens, request=request)
            seconds[num_tokens].append(time_step(predictor, step))
    one, many = (1e6 * min(seconds[number]) for number in (1, PROMPT_TOKENS))
    num_rows = predictor.count_input_rows(np.zeros(PROMPT_TOKENS, np.int64))
    more = max(0.0, many - one) / (num_rows - 1)
    return TokenLatency(one_us=round(one, 2), more_us=round(more, 3))


def time_step(predictor: Predictor, step: RandomStep) -> float:
    """Returns the time of a step's calls, divided by the number of those that forecast."""
    taken, num_answers = 0.0, 0
    for call in step_calls(predictor, step):
        start = time.thread_time()
        forecasts = call()
        taken += time.thread_time() - start
        num_answers += bool(forecasts)
    return taken / num_answers


def step_calls(predictor: Predictor, step: RandomStep) -> Iterator[Callable[[], Forecasts | None]]:
    """Yields the calls of one step in the order of a model's events."""
    signals = predictor.signals

    def bind(method: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        return lambda: method(*args)

    yield bind(predictor.begin_step, step.tokens_T, step.requests_T)
    logits_TE = step.logits_TE if Signal.LOGITS in signals else None
    for layer in range(predictor.spec.num_layers):
        if Signal.LAYER_INPUT in signals:
            yield bind(predictor.layer_input, layer, step.hidden_TD)
        if Signal.GATE_INPUT in signals:
            yield bind(predictor.gate_input, layer, step.hidden_TD)
        if Signal.ROUTED in signals:
            yield bind(predictor.routed, layer, step.experts_TK, logits_TE)
    yield predictor.end_step
