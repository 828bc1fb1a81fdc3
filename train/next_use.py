"""The networks behind `next-use`: one of the context, one of each layer, and their training data.

    summary = relu(norm(means of earlier states) @ P + p)
    features = norm(gate input, fading counts, routing behind the same text), summary
    probabilities = sigmoid(relu(features @ W + b) @ U + c)

Cross-entropy with the uses that came true within each horizon.

Shape suffixes: L layers, N rows of the trace, B batch, D hidden size, C decays of the context, X
features of a layer, Y numbers of the summary, Z both, E experts, K top_k, F width, H horizons.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from collect.traces import Trace, TraceSignal
from predictors.base import HORIZONS, Floats, Predictor
from predictors.next_use import CONTEXT_DECAYS, NextUsePredictor, num_features
from predictors.routing_history import (
    FOLLOWING_WEIGHTS,
    MATCHED,
    NUM_FOLLOWING,
    WINDOW,
    find_match,
    flag_match,
)
from predictors.spec import ModelSpec
from train.data import Batch, read_contexts
from train.export import inward_graph, network_graph
from train.networks import SMALLEST_SCALE, uniform
from train.past_routing import read_past, read_used
from train.predictor_stack import PredictorStack, ReferenceScores

KIND = NextUsePredictor.kind
WIDTH = 256
SUMMARY_SIZE = 256

NOTHING = torch.empty(0)

NEVER = 255
"""Stands for a next use that is farther away than any horizon."""

SHOWN_HORIZON = HORIZONS.index(8)
"""The horizon that the accuracy in training is of."""

BLIND_SHARE = 0.25
"""Share of training rows without a context: in a prompt's step there is none yet. With a twentieth,
what a prompt left in the cache was worse than by `reuse`."""


@dataclass(frozen=True)
class NextUseBatch(Batch):
    """Gate inputs in `states`, with what is known of the past and the next uses that came true."""

    past_LBX: Tensor = NOTHING
    """`[L, B, (F + 1) E + M]`: fading means, uses behind the same text, and flags of the match."""
    context_BX: Tensor = NOTHING
    """`[B, C D]`: decaying means of the last layer's earlier states."""
    next_LBE: Tensor = NOTHING
    """Tokens until the next use of each expert, at most NEVER, uint8."""

    def take(self, rows: Tensor) -> "NextUseBatch":
        """Return some of the rows."""
        return NextUseBatch(
            self.chosen_LBK[:, rows],
            {TraceSignal.GATE_INPUT: self.gate_LBD[:, rows]},
            past_LBX=self.past_LBX[:, rows].float(),
            context_BX=self.context_BX[rows].float(),
            next_LBE=self.next_LBE[:, rows],
        )

    def to(self, device: torch.device) -> "NextUseBatch":
        return NextUseBatch(
            self.chosen_LBK.to(device),
            {TraceSignal.GATE_INPUT: self.gate_LBD.to(device)},
            past_LBX=self.past_LBX.to(device),
            context_BX=self.context_BX.to(device),
            next_LBE=self.next_LBE.to(device),
        )


class NextUseStack(PredictorStack):
    """The networks of all layers, which share the summary of the context.

    The figure of a layer is the share of the experts used within the next 8 tokens that are in the
    quarter of its experts with the highest probability, relative to the most that a quarter can
    hold.
    """

    mean_LX: Tensor
    deviation_LX: Tensor
    context_mean_X: Tensor
    context_deviation_X: Tensor
    lr_share = 0.5
    """On four layers and 150,000 tokens, in two epochs, half of the run's rate closes 47.0 % of the
    gap to Belady at 25 % of the experts, a quarter of it 44.8 %."""

    def __init__(
        self, spec: ModelSpec, routers_LED: Floats, biases_LE: Floats, *, width: int = WIDTH
    ):
        super().__init__()
        self.spec, self._routers, self._biases = spec, routers_LED, biases_LE
        layers, size = spec.num_layers, num_features(spec)
        outputs, whole = len(HORIZONS) * spec.num_experts, size + SUMMARY_SIZE
        given = len(CONTEXT_DECAYS) * spec.hidden_size
        self.labels = [f"{KIND}/layer_{layer:02d}" for layer in range(layers)]
        self.num_kept = max(1, spec.num_experts // 4)
        self.context_in_XY = nn.Parameter(uniform(1, given, SUMMARY_SIZE, inputs=given)[0])
        self.context_bias_Y = nn.Parameter(torch.zeros(SUMMARY_SIZE))
        self.weight_in_LZF = nn.Parameter(uniform(layers, whole, width, inputs=whole))
        self.bias_in_LF = nn.Parameter(torch.zeros(layers, width))
        self.weight_out_LFE = nn.Parameter(torch.zeros(layers, width, outputs))
        self.bias_out_LE = nn.Parameter(torch.full((layers, outputs), -2.0))
        self.register_buffer("mean_LX", torch.zeros(layers, size))
        self.register_buffer("deviation_LX", torch.ones(layers, size))
        self.register_buffer("context_mean_X", torch.zeros(given))
        self.register_buffer("context_deviation_X", torch.ones(given))
        self.register_buffer("horizons_H1", torch.tensor(HORIZONS)[:, None])

    def _features(self, batch: Batch) -> Tensor:
        assert isinstance(batch, NextUseBatch)
        return torch.cat([batch.gate_LBD, batch.past_LBX], dim=-1)

    def normalise_by(self, batch: Batch) -> None:
        assert isinstance(batch, NextUseBatch)
        features_LBX = self._features(batch)
        self.mean_LX.copy_(features_LBX.mean(1))
        self.deviation_LX.copy_(features_LBX.std(1).clamp(min=SMALLEST_SCALE))
        self.context_mean_X.copy_(batch.context_BX.mean(0))
        self.context_deviation_X.copy_(batch.context_BX.std(0).clamp(min=SMALLEST_SCALE))

    def forward(self, batch: Batch) -> Tensor:
        """Logits `[L, B, H E]`."""
        assert isinstance(batch, NextUseBatch)
        context_BX = batch.context_BX
        if self.training:
            is_seen_B1 = torch.rand(len(context_BX), 1, device=context_BX.device) >= BLIND_SHARE
            context_BX = context_BX * is_seen_B1
        normal_BX = (context_BX - self.context_mean_X) / self.context_deviation_X
        summary_BY = torch.addmm(self.context_bias_Y, normal_BX, self.context_in_XY).relu()
        normal_LBX = (self._features(batch) - self.mean_LX[:, None]) / self.deviation_LX[:, None]
        shared_LBY = summary_BY.expand(len(normal_LBX), -1, -1)
        whole_LBZ = torch.cat([normal_LBX, shared_LBY], dim=-1)
        middle_LBF = torch.baddbmm(self.bias_in_LF[:, None], whole_LBZ, self.weight_in_LZF).relu()
        return torch.baddbmm(self.bias_out_LE[:, None], middle_LBF, self.weight_out_LFE)

    def _by_horizon(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits and whether they came true, `[L, B, H, E]`."""
        assert isinstance(batch, NextUseBatch)
        logits = self(batch).unflatten(-1, (len(HORIZONS), -1))
        return logits, batch.next_LBE[:, :, None] <= self.horizons_H1

    def losses(self, batch: Batch) -> Tensor:
        logits, came_true = self._by_horizon(batch)
        every = nn.functional.binary_cross_entropy_with_logits(
            logits, came_true.float(), reduction="none"
        )
        return every.sum((-1, -2)).mean(-1)

    def hits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits, came_true = self._by_horizon(batch)
        kept = logits[:, :, SHOWN_HORIZON].topk(self.num_kept, dim=-1).indices
        is_used = came_true[:, :, SHOWN_HORIZON].float()
        best = is_used.sum(-1).clamp(max=self.num_kept)
        return is_used.gather(-1, kept).sum((1, 2)), best.sum(1)

    @torch.no_grad()
    def export(self, spec: ModelSpec) -> Mapping[str, Predictor]:
        context = inward_graph(
            *fold(
                self.context_mean_X,
                self.context_deviation_X,
                self.context_in_XY,
                self.context_bias_Y,
            ),
            name=f"{KIND}_context",
            normaliser=(as_array(self.context_mean_X), as_array(self.context_deviation_X)),
        )
        graphs = {}
        # The summary enters as it is.
        none, one = torch.zeros(SUMMARY_SIZE), torch.ones(SUMMARY_SIZE)
        for layer in range(spec.num_layers):
            mean = torch.cat([self.mean_LX[layer].cpu(), none])
            deviation = torch.cat([self.deviation_LX[layer].cpu(), one])
            inward = fold(mean, deviation, self.weight_in_LZF[layer], self.bias_in_LF[layer])
            graphs[layer] = network_graph(
                *inward,
                as_array(self.weight_out_LFE[layer]),
                as_array(self.bias_out_LE[layer]),
                name=f"{KIND}_{layer}",
                normaliser=(as_array(mean), as_array(deviation)),
            )
        return {KIND: NextUsePredictor(spec, context, graphs, self._routers, self._biases)}

    def answers(self, batch: Batch) -> Iterator[ReferenceScores]:  # noqa: ARG002
        """None: its answers depend on all tokens before, and are compared in its own test."""
        return iter(())


def fold(
    mean_X: Tensor, deviation_X: Tensor, weight: Tensor, bias: Tensor
) -> tuple[NDArray, NDArray]:
    """Return weights and biases that take inputs which are not normalised."""
    folded = weight.double().cpu() / deviation_X.double().cpu()[:, None]
    return as_array(folded), as_array(bias.double().cpu() - mean_X.double().cpu() @ folded)


def as_array(tensor: Tensor) -> NDArray[np.float32]:
    return np.asarray(tensor.float().cpu().numpy())


def read_stretch(
    trace: Trace,
    rows_N: NDArray[np.int64],
    first: int,
    last: int,
    routers_LED: Floats,
    biases_LE: Floats,
) -> NextUseBatch:
    """Rows `first..last` of `rows_N`, one request after another as a server without rest runs them.

    A prompt counts token by token, as generated tokens do.
    """
    spec = trace.spec
    past = read_past(trace, rows_N, first, last, routers_LED, biases_LE)
    column = trace.column(TraceSignal.GATE_INPUT, spec.num_layers - 1)
    context_C1BD, _ = read_contexts(
        [column], rows_N[first:last], requests=trace.requests, decays=CONTEXT_DECAYS
    )
    context_BX = context_C1BD[:, 0].swapaxes(0, 1).reshape(last - first, -1)
    behind_LBX = read_behind(trace, rows_N, first, last)
    next_NLE = count_to_next_use(read_used(trace, rows_N[first : last + max(HORIZONS)]))
    return NextUseBatch(
        past.chosen_LBK,
        {TraceSignal.GATE_INPUT: past.gate_LBD},
        past_LBX=torch.cat([past.fading_LBX, torch.from_numpy(behind_LBX)], dim=-1),
        context_BX=torch.from_numpy(context_BX),
        next_LBE=torch.from_numpy(next_NLE[: last - first].swapaxes(0, 1)),
    )


def read_behind(
    trace: Trace, rows_N: NDArray[np.int64], first: int, last: int
) -> NDArray[np.float16]:
    """Return `[L, B, E + M]`: the uses behind the same text before each row, and their flags."""
    spec = trace.spec
    start = max(0, first - WINDOW)
    tokens = np.asarray(trace.tokens[rows_N[start:last]], np.int64)
    used_NLE = read_used(trace, rows_N[start:last]).astype(np.float32)
    shape = (spec.num_layers, last - first, spec.num_experts + len(MATCHED))
    behind_LBX = np.zeros(shape, np.float16)
    for place in range(last - first):
        newest = first - start + place
        match, length = find_match(tokens, newest, first=max(0, newest - WINDOW))
        if match < 0:
            continue
        following_XLE = used_NLE[match + 1 : min(match + 1 + NUM_FOLLOWING, newest + 1)]
        weights_X = FOLLOWING_WEIGHTS[: len(following_XLE)]
        behind_LBX[:, place, : spec.num_experts] = np.tensordot(weights_X, following_XLE, (0, 0))
        behind_LBX[:, place, spec.num_experts :] = flag_match(length)
    return behind_LBX


def count_to_next_use(used_NLE: Floats) -> NDArray[np.uint8]:
    """Return the rows from each row to the next use of each expert, at most NEVER."""
    count_NLE = np.full(used_NLE.shape, NEVER, np.uint8)
    for row in range(len(used_NLE) - 2, -1, -1):
        later = np.minimum(count_NLE[row + 1], NEVER - 1) + 1
        count_NLE[row] = np.where(used_NLE[row + 1] > 0, 1, later)
    return count_NLE
