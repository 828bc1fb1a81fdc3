"""The networks behind `reuse`, one for each layer as one stack.

    pooled = norm(gate input) @ P
    value = sigmoid(features @ S + relu(features @ W + b) @ U + c)
    features = pooled, norm(fading counts, fading router probabilities)

Cross-entropy with the value that came true, a number in [0, 1].

Shape suffixes: L layers, B batch, D hidden size, R pooled, X fading means, Y = R + X features, E
experts, F width.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from predictors.base import Predictor
from predictors.reuse import NUM_FADING, ReusePredictor
from predictors.spec import ModelSpec
from train.data import Batch
from train.export import reuse_graph
from train.networks import SMALLEST_SCALE, uniform
from train.predictor_stack import PredictorStack, ReferenceScores
from train.reuse_data import ReuseBatch

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
        assert isinstance(batch, ReuseBatch)
        for given, mean, deviation in (
            (batch.gate_LBD, self.mean_LD, self.deviation_LD),
            (batch.fading_LBX, self.mean_LX, self.deviation_LX),
        ):
            mean.copy_(given.mean(1))
            deviation.copy_(given.std(1).clamp(min=SMALLEST_SCALE))

    def forward(self, batch: Batch) -> Tensor:
        """Logits `[L, B, E]`."""
        assert isinstance(batch, ReuseBatch)
        normal_LBD = (batch.gate_LBD - self.mean_LD[:, None]) / self.deviation_LD[:, None]
        normal_LBX = (batch.fading_LBX - self.mean_LX[:, None]) / self.deviation_LX[:, None]
        features_LBY = torch.cat([normal_LBD @ self.pool_LDR, normal_LBX], dim=-1)
        middle_LBF = torch.baddbmm(self.bias_in_LF[:, None], features_LBY, self.weight_in_LYF)
        straight_LBE = torch.baddbmm(self.bias_out_LE[:, None], features_LBY, self.straight_LYE)
        return torch.baddbmm(straight_LBE, middle_LBF.relu(), self.weight_out_LFE)

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
                "means_centre": self.mean_LX[layer],
                "means_factor": 1 / self.deviation_LX[layer],
                "out": self.weight_out_LFE[layer],
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
