"""A synthetic trace on disk whose routing can be learned.

Shape suffixes: N tokens, D hidden size, E experts, K top_k.
"""

from pathlib import Path
from typing import Any

import numpy as np

from collect.traces import Trace, TracePlan, TraceRequest, TraceSignal, TraceWriter
from collect.traces.layout import ALL_SIGNALS, choose_split, column_name, prompt_digest
from collect.traces.manifest import TraceModel, hash_value
from collect.traces.writer import to_half
from predictors.spec import ModelSpec

VOCABULARY = 50
DRIFT = 0.3
"""Share of the hidden state that is new at each layer: routing is learnable, and not trivial."""


def make_spec(**sizes: int) -> ModelSpec:
    """Four layers of eight experts, of which two are chosen."""
    known = {"model_id": "synthetic", "revision": "0" * 40, "config_hash": "1" * 64}
    shape = {"num_layers": 4, "num_experts": 8, "top_k": 2, "hidden_size": 16}
    return ModelSpec(**known, **{**shape, **sizes}, dtype="float32")


def make_plan(
    spec: ModelSpec, *, num_units: int = 2, requests_per_unit: int = 20, seed=0, signals=ALL_SIGNALS
) -> TracePlan:
    settings = {"seed": seed, "requests_per_unit": requests_per_unit}
    return TracePlan(
        source="recorded", dataset="synthetic", model=TraceModel.from_spec(spec),
        signals=tuple(signals), settings=settings, prompts_digest=hash_value(settings),
        units=tuple(hash_value([settings, unit]) for unit in range(num_units)),
    )  # fmt: skip


def unit_content(plan: TracePlan, unit: int, *, prompt_tokens: int = 6, new_tokens: int = 4):
    """`(arrays, requests)` of one unit, as `TraceWriter.write` takes them; the same every time.

    The hidden state is an embedding of the token that drifts from layer to layer; each layer's
    router is a fixed random matrix over it.
    """
    spec, seed = plan.spec, plan.settings["seed"]
    per_unit = plan.settings["requests_per_unit"]
    fixed = np.random.default_rng(seed)
    embedding = fixed.standard_normal((VOCABULARY, spec.hidden_size))
    routers = fixed.standard_normal((spec.num_layers, spec.num_experts, spec.hidden_size))
    random = np.random.default_rng([seed, unit])
    length = prompt_tokens + new_tokens
    first = unit * per_unit
    tokens = random.integers(0, VOCABULARY, per_unit * length)
    position = np.tile(np.arange(length), per_unit)
    arrays = {
        "request": np.repeat(np.arange(first, first + per_unit), length), "position": position,
        "token": tokens, "phase": position >= prompt_tokens,
    }  # fmt: skip
    hidden_ND = embedding[tokens]
    for layer in range(spec.num_layers):
        entering_ND = hidden_ND
        hidden_ND = (1 - DRIFT) * hidden_ND + DRIFT * random.standard_normal(hidden_ND.shape)
        logits_NE = hidden_ND @ routers[layer].T
        experts_NK = np.argsort(-logits_NE, axis=1)[:, : spec.top_k]
        weights_NK = np.exp(np.take_along_axis(logits_NE, experts_NK, axis=1))
        values = {
            TraceSignal.LAYER_INPUT: entering_ND, TraceSignal.GATE_INPUT: hidden_ND,
            TraceSignal.GATE_LOGITS: logits_NE, TraceSignal.EXPERTS: experts_NK,
            TraceSignal.WEIGHTS: weights_NK / weights_NK.sum(axis=1, keepdims=True),
        }  # fmt: skip
        for signal in plan.signals:
            arrays[column_name(signal, layer)] = to_half(values[signal], signal, layer)
    requests = []
    for index in range(first, first + per_unit):
        digest = prompt_digest(f"prompt {seed} {index}")
        named = {"index": index, "digest": digest, "dataset": plan.dataset}
        sizes = {"prompt_tokens": prompt_tokens, "generated_tokens": new_tokens}
        requests.append(TraceRequest(**named, **sizes, split=choose_split(digest)))
    return arrays, requests


def make_trace(
    folder: Path, *, spec: ModelSpec | None = None, prompt_tokens=6, new_tokens=4, **planned: Any
) -> Trace:
    """`num_units x requests_per_unit` requests of `prompt_tokens + new_tokens` rows each.

    Args:
        planned: Options of `make_plan`.
    """
    plan = make_plan(spec or make_spec(), **planned)
    writer = TraceWriter(folder, plan)
    for unit in writer.missing():
        content = unit_content(plan, unit, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        writer.write(unit, *content)
    return writer.finish()
