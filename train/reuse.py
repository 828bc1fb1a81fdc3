"""The networks behind `reuse`, one for each layer as one stack.

    value = sigmoid(features @ S + relu(features @ W + b) @ U + c)
    features = norm(gate input, fading counts, fading router probabilities)

Cross-entropy with the value that came true, a number in [0, 1].

Shape suffixes: L layers, B batch, D hidden size, X features, E experts, F width.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from predictors.base import Floats, Predictor
from predictors.reuse import NUM_FADING, ReusePredictor
from predictors.spec import ModelSpec
from train.data import Batch
from train.export import skipping_graph
from train.networks import SMALLEST_SCALE, uniform
from train.predictor_stack import PredictorStack, ReferenceScores
from train.reuse_data import ReuseBatch

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
