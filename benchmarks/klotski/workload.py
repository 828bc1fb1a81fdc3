"""Groups of requests as in the paper: prompts of 512 tokens and 32 new ones (Klotski, section 9.1).

Texts are consecutive tokens of the held-out requests, laid end to end, from random places on; their
routing is folded to Mixtral's 8 experts of which 2 are chosen. A shape with more layers than the
traced model has its layers again and again, so that the number of experts and of those that fit are
the shape's own.

Shape suffixes: T tokens, K top_k, L layers of the trace, B requests of a micro-batch, N rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.klotski.group_simulator import GroupStep
from benchmarks.papers.paper_context import ExpertFold
from collect.traces import Trace, TraceSignal
from predictors.base import Floats, Ints
from predictors.correlation import CorrelationPredictor
from predictors.metrics import Phase
from predictors.spec import ModelSpec
from runtime.config import ShapeConfig
from runtime.sim.step import EMPTY

NUM_EXPERTS, TOP_K = 8, 2
PROMPT_TOKENS, NEW_TOKENS = 512, 32
SIMULATED_STEPS = 8
"""Decode steps that are simulated; the others are taken to be like them."""
TABLE_REQUESTS = 8
"""Sequences of `PROMPT_TOKENS` that fill the correlation table (Klotski, section 8)."""
KV_BYTES = 4096
"""KV cache of a token and layer: 8 heads of 128 values, keys and values, two bytes each
(config.json of Mixtral-8x7B and 8x22B)."""


@dataclass(frozen=True, eq=False)
class TiledStep:
    """Routing of a forward pass through more layers than were recorded."""

    requests_T: Ints
    experts_LTK: Ints

    @property
    def tokens_T(self) -> Ints:
        """Zeros: no predictor here reads tokens."""
        return np.zeros(len(self.requests_T), dtype=np.int64)

    def experts(self, layer: int) -> Ints:
        return self.experts_LTK[layer % len(self.experts_LTK)]

    def layer_input(self, layer: int) -> Floats:  # noqa: ARG002
        """Nothing: no predictor here reads hidden states."""
        return EMPTY

    gate_input = logits = layer_input


class TokenPool:
    """Routing of a trace's tokens, of prompts and of generated ones, to draw requests from.

    Args:
        trace: A trace with generated tokens.
        split: Which of its requests.
    """

    def __init__(self, trace: Trace, *, split: str = "held_out"):
        fold = ExpertFold(trace.spec.num_experts, NUM_EXPERTS, TOP_K)
        rows_N = trace.rows(split)
        experts_LNK = np.stack(
            [
                fold.fold_experts(trace.column(TraceSignal.EXPERTS, layer)[rows_N].astype(np.int64))
                for layer in range(trace.spec.num_layers)
            ]
        )
        is_prompt_N = trace.phases[rows_N] == Phase.PREFILL
        self._prompts_LNK = experts_LNK[:, is_prompt_N]
        self._generated_LNK = experts_LNK[:, ~is_prompt_N]
        self.num_requests = len(np.unique(trace.requests[rows_N]))

    def draw_prompts(self, requests_B: Ints, rng: np.random.Generator) -> TiledStep:
        """Draws the prompts of some requests, as one step."""
        experts_LTK = self._draw(self._prompts_LNK, len(requests_B), PROMPT_TOKENS, rng)
        return TiledStep(np.repeat(requests_B, PROMPT_TOKENS), experts_LTK)

    def draw_decode_steps(
        self, requests_B: Ints, num_steps: int, rng: np.random.Generator
    ) -> list[TiledStep]:
        """Draws consecutive tokens of each request; returns one step for each token."""
        size = len(requests_B)
        experts_LTK = self._draw(self._generated_LNK, size, num_steps, rng)
        steps = experts_LTK.reshape(len(experts_LTK), size, num_steps, -1)
        return [TiledStep(requests_B, steps[:, :, i]) for i in range(num_steps)]

    def _draw(
        self, experts_LNK: Ints, requests: int, tokens: int, rng: np.random.Generator
    ) -> Ints:
        num_rows = experts_LNK.shape[1]
        starts = rng.integers(0, num_rows, requests)
        rows_T = (starts[:, None] + np.arange(tokens)).reshape(-1) % num_rows
        return experts_LNK[:, rows_T]


@dataclass(frozen=True, kw_only=True)
class GroupWorkload:
    """A group of requests with the paper's lengths.

    Attributes:
        batch: Requests of a micro-batch.
        n: Micro-batches of the group; 1: a single batch.
        merges_experts: As in `GroupStep`.
        moves_caches: KV caches are in host memory and loaded for each layer.
        weight_bytes: As in `GroupStep`.
    """

    batch: int
    n: int
    merges_experts: bool
    moves_caches: bool
    weight_bytes: int

    @property
    def num_requests(self) -> int:
        return self.batch * self.n

    def draw(self, pool: TokenPool, rng: np.random.Generator) -> Iterator[GroupStep]:
        """Yields the prompts' step and `SIMULATED_STEPS` decode steps."""
        batches = np.arange(self.num_requests).reshape(self.n, self.batch)
        yield self._group([pool.draw_prompts(requests_B, rng) for requests_B in batches])
        yield from self.draw_decode_steps(pool, SIMULATED_STEPS, rng)

    def draw_decode_steps(
        self, pool: TokenPool, num_steps: int, rng: np.random.Generator
    ) -> Iterator[GroupStep]:
        """Yields decode steps of consecutive tokens of each request."""
        batches = np.arange(self.num_requests).reshape(self.n, self.batch)
        decode = [pool.draw_decode_steps(requests_B, num_steps, rng) for requests_B in batches]
        # On average, half of the answer is in the cache.
        cached = self.batch * (PROMPT_TOKENS + NEW_TOKENS // 2) if self.moves_caches else 0
        for steps in zip(*decode, strict=True):
            yield self._group(steps, cache_bytes=cached * KV_BYTES)

    def _group(self, steps: Sequence[TiledStep], *, cache_bytes: int = 0) -> GroupStep:
        return GroupStep(
            steps,
            merges_experts=self.merges_experts,
            cache_bytes=cache_bytes,
            weight_bytes=self.weight_bytes,
        )


def tile_spec(trace: Trace, shape: ShapeConfig) -> ModelSpec:
    """Returns the traced model with the shape's experts and number of layers."""
    return replace(trace.spec, num_layers=shape.num_layers, num_experts=NUM_EXPERTS, top_k=TOP_K)


def fill_correlation_table(spec: ModelSpec, pool: TokenPool) -> CorrelationPredictor:
    """Returns a predictor that has seen `TABLE_REQUESTS` prompts (Klotski, section 8)."""
    predictor = CorrelationPredictor.empty(spec)
    step = pool.draw_prompts(np.arange(TABLE_REQUESTS), np.random.default_rng(0))
    predictor.begin_step(step.tokens_T, step.requests_T)
    for layer in range(spec.num_layers):
        predictor.routed(layer, step.experts(layer), None)
    predictor.end_step()
    return predictor
