"""The networks behind `reuse`, one for each layer as one stack, and their training data.

    value = sigmoid(features @ S + relu(features @ W + b) @ U + c)
    features = norm(gate input, fading counts, fading router probabilities)

Cross-entropy with the value that came true, a number in [0, 1].

Shape suffixes: L layers, N rows of a pool, B batch, D hidden size, X features, E experts, K top_k,
F width or, of the fading counts, sums of an expert.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from collect.traces import Trace, TraceSignal
from predictors.base import Floats, Predictor
from predictors.fading import NUM_FADING
from predictors.reuse import ReusePredictor
from predictors.spec import ModelSpec
from train.data import Batch
from train.export import skipping_graph
from train.networks import SMALLEST_SCALE, uniform
from train.past_routing import read_past, read_used
from train.predictor_stack import PredictorStack, ReferenceScores

KIND = "reuse"
WIDTH = 256


class ReuseStack(PredictorStack):
    """The networks of all layers.

    The figure of a layer is the share of the next tokens' discounted uses that fall on the quarter
    of its experts with the highest scores, relative to scores that know the future.
    """

    mean_LX: Tensor
    deviation_LX: Tensor
    lr_share = 0.25
    """On three layers and 4,000 held-out tokens at 25 % of the experts: a quarter of the run's rate
    closes 44.0 % of the gap to Belady, all of it 43.3 %; at 75 % of the experts 38.3 and 36.2 %."""

    def __init__(
        self, spec: ModelSpec, routers_LED: Floats, biases_LE: Floats, *, width: int = WIDTH
    ):
        super().__init__()
        self.spec, self._routers, self._biases = spec, routers_LED, biases_LE
        layers, experts = spec.num_layers, spec.num_experts
        size = spec.hidden_size + NUM_FADING * experts
        self.labels = [f"{KIND}/layer_{layer:02d}" for layer in range(layers)]
        self.num_kept = max(1, experts // 4)
        self.weight_in_LXF = nn.Parameter(uniform(layers, size, width, inputs=size))
        self.bias_in_LF = nn.Parameter(torch.zeros(layers, width))
        self.weight_out_LFE = nn.Parameter(torch.zeros(layers, width, experts))
        self.straight_LXE = nn.Parameter(torch.zeros(layers, size, experts))
        self.bias_out_LE = nn.Parameter(torch.full((layers, experts), -2.0))
        self.register_buffer("mean_LX", torch.zeros(layers, size))
        self.register_buffer("deviation_LX", torch.ones(layers, size))

    def _features(self, batch: Batch) -> Tensor:
        assert isinstance(batch, ReuseBatch)
        return torch.cat([batch.gate_LBD, batch.fading_LBX], dim=-1)

    def normalise_by(self, batch: Batch) -> None:
        features_LBX = self._features(batch)
        self.mean_LX.copy_(features_LBX.mean(1))
        self.deviation_LX.copy_(features_LBX.std(1).clamp(min=SMALLEST_SCALE))

    def forward(self, batch: Batch) -> Tensor:
        """Logits `[L, B, E]`."""
        normal_LBX = (self._features(batch) - self.mean_LX[:, None]) / self.deviation_LX[:, None]
        middle_LBF = torch.baddbmm(self.bias_in_LF[:, None], normal_LBX, self.weight_in_LXF).relu()
        straight_LBE = torch.baddbmm(self.bias_out_LE[:, None], normal_LBX, self.straight_LXE)
        return torch.baddbmm(straight_LBE, middle_LBF, self.weight_out_LFE)

    def losses(self, batch: Batch) -> Tensor:
        assert isinstance(batch, ReuseBatch)
        every = nn.functional.binary_cross_entropy_with_logits(
            self(batch), batch.value_LBE, reduction="none"
        )
        return every.sum(-1).mean(-1)

    def hits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert isinstance(batch, ReuseBatch)
        kept = self(batch).topk(self.num_kept, dim=-1).indices
        best = batch.value_LBE.topk(self.num_kept, dim=-1).values
        return batch.value_LBE.gather(-1, kept).sum((1, 2)), best.sum((1, 2))

    @torch.no_grad()
    def export(self, spec: ModelSpec) -> Mapping[str, Predictor]:
        graphs = {}
        for layer in range(spec.num_layers):
            inverse_X1 = self.deviation_LX[layer].double().reciprocal()[:, None]
            mean_X = self.mean_LX[layer].double()
            in_XF = inverse_X1 * self.weight_in_LXF[layer].double()
            straight_XE = inverse_X1 * self.straight_LXE[layer].double()
            weights = (
                in_XF,
                self.bias_in_LF[layer].double() - mean_X @ in_XF,
                self.weight_out_LFE[layer],
                straight_XE,
                self.bias_out_LE[layer].double() - mean_X @ straight_XE,
            )
            arrays = [weight.float().cpu().numpy() for weight in weights]
            graphs[layer] = skipping_graph(
                *arrays,
                name=f"{KIND}_{layer}",
                normaliser=(
                    self.mean_LX[layer].cpu().numpy(),
                    self.deviation_LX[layer].cpu().numpy(),
                ),
            )
        return {KIND: ReusePredictor(spec, graphs, self._routers, self._biases)}

    def answers(self, batch: Batch) -> Iterator[ReferenceScores]:  # noqa: ARG002
        """None: its answers depend on all tokens before, and are compared in its own test."""
        return iter(())


GAMMA = 0.7
"""Discount of a use one token later. .9 and .97 give slightly worse hit rates."""

NOTHING = torch.empty(0)

AHEAD = 24
"""Rows behind a stretch that are looked at: .7 ** 24 is a five-thousandth."""


@dataclass(frozen=True)
class ReuseBatch(Batch):
    """Gate inputs in `states`, with fading counts of the past and discounted uses of the future."""

    fading_LBX: Tensor = NOTHING
    """`[L, B, F E]`: the decaying means that the networks see."""
    value_LBE: Tensor = NOTHING
    """Share of the near future in which each expert is used, in [0, 1]."""

    @classmethod
    def of(cls, gate_LBD: Tensor, chosen: Tensor, fading: Tensor, value: Tensor) -> "ReuseBatch":
        return cls(chosen, {TraceSignal.GATE_INPUT: gate_LBD}, fading_LBX=fading, value_LBE=value)

    def take(self, rows: Tensor) -> "ReuseBatch":
        """Return some of the rows."""
        return ReuseBatch.of(
            self.gate_LBD[:, rows],
            self.chosen_LBK[:, rows],
            self.fading_LBX[:, rows].float(),
            self.value_LBE[:, rows],
        )

    def to(self, device: torch.device) -> "ReuseBatch":
        moved = [self.gate_LBD, self.chosen_LBK, self.fading_LBX, self.value_LBE]
        return ReuseBatch.of(*(tensor.to(device) for tensor in moved))


def future(used_NLE: Floats, gamma: float) -> Floats:
    """`(1 - gamma) / gamma * sum over t > 0 of gamma^t used(row + t)`, rows in order."""
    value_NLE = np.zeros_like(used_NLE)
    for row in range(len(used_NLE) - 2, -1, -1):
        value_NLE[row] = gamma * value_NLE[row + 1] + (1 - gamma) * used_NLE[row + 1]
    return value_NLE


def read_stretch(
    trace: Trace,
    rows_N: NDArray[np.int64],
    first: int,
    last: int,
    routers_LED: Floats,
    biases_LE: Floats,
) -> ReuseBatch:
    """Rows `first..last` of `rows_N`, one request after another as a server without rest runs them.

    A prompt counts token by token, as generated tokens do.
    """
    past = read_past(trace, rows_N, first, last, routers_LED, biases_LE)
    used_NLE = read_used(trace, rows_N[first : last + AHEAD])
    value_NLE = future(used_NLE, GAMMA)[: last - first]
    return ReuseBatch.of(
        past.gate_LBD, past.chosen_LBK, past.fading_LBX, torch.from_numpy(value_NLE.swapaxes(0, 1))
    )
