"""The networks behind `reuse`, one for each layer as one stack, and the data that they learn from.

    pooled = norm(gate input) @ P
    value = sigmoid(features @ S + relu(features @ W + b) @ U + c)
    features = pooled, norm(fading counts, fading router probabilities)

Cross-entropy with the value that came true, a number in [0, 1]: rows of a trace are read with what
was routed before them and will be after. They depend on their neighbours, as a server runs them. So
neighbouring rows are read and computed together, as a stretch; its rows are then mixed.

Shape suffixes: L layers, N rows, B batch or stretch, D hidden size, R pooled, X fading means, Y = R
+ X features, E experts, K top_k, F width; in data, fading sums of an expert.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from collect.traces import Trace, TraceSignal
from predictors.base import Floats, Ints, Predictor, softmax
from predictors.metrics import mark_used
from predictors.reuse import NUM_FADING, ReusePredictor, fade, normalize_sums
from predictors.spec import ModelSpec
from train.data import Batch, Pool, TraceBatches, read_layers
from train.export import reuse_graph
from train.networks import measure_features, uniform
from train.predictor_stack import PredictorStack, ReferenceScores

STRETCH_ROWS = 4_096
"""Rows of a stretch."""

WARM_UP = 128
"""Rows before a stretch that are counted first."""

GAMMA = 0.7
"""Discount of a use one token later. .9 and .97 give slightly worse hit rates."""

AHEAD = 24
"""Rows behind a stretch that are looked at: .7 ** 24 is a five-thousandth."""

FADING, VALUE = "fading", "value"
"""States of a batch: `[L, B, X]`, the decaying means that the networks see, and `[L, B, E]`, the
share of the near future in which each expert is used, in [0, 1]."""


def read_stretch(trace: Trace, rows_N: NDArray[np.int64], first: int, last: int) -> Pool:
    """Rows `first..last` of `rows_N`, one request after another as a server without rest runs them.

    A prompt counts token by token, as generated tokens do. `last` is excluded.
    """
    spec, start = trace.spec, max(0, first - WARM_UP)
    inside = slice(first - start, last - start)
    around = rows_N[start : last + AHEAD]
    chosen_LNK = read_layers(trace, TraceSignal.EXPERTS, around).astype(np.int64)
    used_NLE = np.stack([mark_used(own_NK, spec.num_experts) for own_NK in chosen_LNK], axis=1)
    logits_LNE = read_layers(trace, TraceSignal.GATE_LOGITS, rows_N[start:last])
    chance_NLE = softmax(logits_LNE.astype(np.float32)).swapaxes(0, 1)
    state_LFE = np.zeros((spec.num_layers, NUM_FADING, spec.num_experts), np.float32)
    fading_BLFE = np.empty((last - first, *state_LFE.shape), np.float16)
    for place in range(last - start):
        fade(state_LFE, used_NLE[place], chance_NLE[place])
        if place >= inside.start:
            fading_BLFE[place - inside.start] = normalize_sums(state_LFE)
    value_BLE = future(used_NLE[inside.start :], GAMMA)[: last - first]
    states = {
        TraceSignal.GATE_INPUT: read_layers(trace, TraceSignal.GATE_INPUT, rows_N[first:last]),
        FADING: fading_BLFE.reshape(*fading_BLFE.shape[:2], -1).swapaxes(0, 1),
        VALUE: value_BLE.swapaxes(0, 1),
    }
    return Pool(chosen_LNK[:, inside], states)


def future(used_NLE: Floats, gamma: float) -> Floats:
    """`(1 - gamma) / gamma * sum over t > 0 of gamma^t used(row + t)`, rows in order."""
    value_NLE = np.zeros_like(used_NLE)
    for row in range(len(used_NLE) - 2, -1, -1):
        value_NLE[row] = gamma * value_NLE[row + 1] + (1 - gamma) * used_NLE[row + 1]
    return value_NLE


class ReuseBatches(TraceBatches):
    """Stretches of the trace in random order, their tokens in random order.

    What does not fill a batch is dropped of each stretch. `epoch` None: in order, nothing dropped.
    """

    @property
    def pool_rows(self) -> int:
        return STRETCH_ROWS

    def _pools(self) -> Iterator[tuple[Pool, Ints]]:
        random = np.random.default_rng([self.seed, self.epoch or 0])
        starts = np.arange(0, len(self._rows), STRETCH_ROWS)
        for first in (starts if self.epoch is None else random.permutation(starts)).tolist():
            last = min(first + STRETCH_ROWS, len(self._rows))
            order = np.arange(last - first)
            stretch = read_stretch(self.trace, self._rows, first, last)
            yield stretch, order if self.epoch is None else random.permutation(order)


KIND = "reuse"
WIDTH = 128
POOLED = 64
"""Numbers that the gate input is summed up in. Share of coming uses that is found, on a layer of
the reference model: .640 with all 256 numbers of a state and width 256, .634 with these, .610 with
none. At a hidden size of 2,048, these need a third of the weights of the first."""


class ReuseStack(PredictorStack):
    """The networks of all layers.

    The figure of a layer is the share of the next tokens' discounted uses that fall on the quarter
    of its experts with the highest scores, relative to scores that know the future.
    """

    mean_LD: Tensor
    deviation_LD: Tensor
    mean_LX: Tensor
    deviation_LX: Tensor
    batches = ReuseBatches
    lr_share = 0.25
    """On three layers and 4,000 held-out tokens at 25 % of the experts: a quarter of the run's rate
    closes 44.0 % of the gap to Belady, all of it 43.3 %; at 75 % of the experts 38.3 and 36.2 %."""

    def __init__(self, spec: ModelSpec, *, width: int = WIDTH):
        super().__init__()
        self.spec = spec
        layers, experts, hidden = spec.num_layers, spec.num_experts, spec.hidden_size
        num_means = NUM_FADING * experts
        size = POOLED + num_means
        self.labels = [f"{KIND}/layer_{layer:02d}" for layer in range(layers)]
        self.num_kept = max(1, experts // 4)
        self.pool_LDR = nn.Parameter(torch.randn(layers, hidden, POOLED) / math.sqrt(hidden))
        self.weight_in_LYF = nn.Parameter(uniform(layers, size, width, inputs=size))
        self.bias_in_LF = nn.Parameter(torch.zeros(layers, width))
        self.weight_out_LFE = nn.Parameter(torch.zeros(layers, width, experts))
        self.straight_LYE = nn.Parameter(torch.zeros(layers, size, experts))
        self.bias_out_LE = nn.Parameter(torch.full((layers, experts), -2.0))
        for name, number in (("LD", hidden), ("LX", num_means)):
            self.register_buffer(f"mean_{name}", torch.zeros(layers, number))
            self.register_buffer(f"deviation_{name}", torch.ones(layers, number))

    def normalise_by(self, batch: Batch) -> None:
        measure_features(batch.gate_LBD, self.mean_LD, self.deviation_LD)
        measure_features(batch.states[FADING], self.mean_LX, self.deviation_LX)

    def forward(self, batch: Batch) -> Tensor:
        """Logits `[L, B, E]`."""
        normal_LBD = (batch.gate_LBD - self.mean_LD[:, None]) / self.deviation_LD[:, None]
        normal_LBX = (batch.states[FADING] - self.mean_LX[:, None]) / self.deviation_LX[:, None]
        features_LBY = torch.cat([normal_LBD @ self.pool_LDR, normal_LBX], dim=-1)
        middle_LBF = torch.baddbmm(self.bias_in_LF[:, None], features_LBY, self.weight_in_LYF)
        straight_LBE = torch.baddbmm(self.bias_out_LE[:, None], features_LBY, self.straight_LYE)
        return torch.baddbmm(straight_LBE, middle_LBF.relu(), self.weight_out_LFE)

    def losses(self, batch: Batch) -> Tensor:
        every = nn.functional.binary_cross_entropy_with_logits(
            self(batch), batch.states[VALUE], reduction="none"
        )
        return every.sum(-1).mean(-1)

    def hits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        value_LBE = batch.states[VALUE]
        kept = self(batch).topk(self.num_kept, dim=-1).indices
        best = value_LBE.topk(self.num_kept, dim=-1).values
        return value_LBE.gather(-1, kept).sum((1, 2)), best.sum((1, 2))

    @torch.no_grad()
    def export(self, spec: ModelSpec) -> Mapping[str, Predictor]:
        graphs = {}
        for layer in range(spec.num_layers):
            normaliser = self.mean_LD[layer], self.deviation_LD[layer]
            mean_D, deviation_D = (array.double() for array in normaliser)
            pool_DR = self.pool_LDR[layer].double() / deviation_D[:, None]
            from_features_YO = torch.cat([self.weight_in_LYF[layer], self.straight_LYE[layer]], 1)
            weights = {
                "pool": pool_DR,
                "pool_bias": -mean_D @ pool_DR,
                "from_pool": from_features_YO[:POOLED],
                "from_means": from_features_YO[POOLED:],
                "bias": torch.cat([self.bias_in_LF[layer], self.bias_out_LE[layer]]),
                "out": self.weight_out_LFE[layer],
                "means_centre": self.mean_LX[layer],
                "means_factor": 1 / self.deviation_LX[layer],
            }
            graphs[layer] = reuse_graph(
                {key: value.float().cpu().numpy() for key, value in weights.items()},
                name=f"{KIND}_{layer}",
                normaliser=tuple(array.cpu().numpy() for array in normaliser),
            )
        return {KIND: ReusePredictor(spec, graphs)}

    def answers(self, batch: Batch) -> Iterator[ReferenceScores]:  # noqa: ARG002
        """None: its answers depend on all tokens before, and are compared in its own test."""
        return iter(())
