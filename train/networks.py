"""All learned networks of a run as one stack: one batched product does every layer's work.

Shape suffixes: L layers, N networks, B batch, D hidden size, F width, E experts, K top_k, P experts
and padding.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from predictors.base import Predictor, Signal
from predictors.registry import FEED_FORWARD
from predictors.spec import ModelSpec
from train.data import Batch, InputSpec
from train.errors import TrainError
from train.export import network_graph
from train.predictor_stack import PredictorStack, ReferenceScores

SMALLEST_SCALE = 1e-3
"""Smallest deviation: features that hardly vary are scaled by at most a thousand."""

WHOLE_VECTORS = 16
"""Floats in the widest vector register. The optimizer's last, broken vector is computed apart, with
another rounding: where each network's weights are whole vectors, none of them learns otherwise for
being the last of its stack. All but the output's bias are, for widths that this divides."""


@dataclass(frozen=True)
class NetworkSpec:
    """One network: what it is part of, the layer it reads, the layer whose experts it forecasts."""

    kind: str
    source: int
    target: int

    @property
    def signal(self) -> Signal:
        (signal,) = FEED_FORWARD[self.kind].signals
        return signal

    @property
    def label(self) -> str:
        return f"{self.kind}/layer_{self.target:02d}"


def network_specs(spec: ModelSpec, kinds: Sequence[str]) -> list[NetworkSpec]:
    """Return every network of these kinds, kind by kind, bottom layer first."""
    specs = [
        NetworkSpec(kind, source, source + FEED_FORWARD[kind].horizon)
        for kind in kinds
        for source in range(spec.num_layers - FEED_FORWARD[kind].horizon)
    ]
    if not specs:
        raise TrainError(
            f"{spec.model_id} has {spec.num_layers} layers with experts: "
            f"no layer lies ahead of another for {', '.join(kinds)}"
        )
    return specs


class NetworkStack(nn.Module):
    """N networks `hidden -> ReLU(width) -> experts` (ProMoE, section 6.3) with separate weights."""

    mean_ND: Tensor
    scale_ND: Tensor

    def __init__(self, num_networks: int, spec: ModelSpec, *, width: int):
        super().__init__()
        hidden, experts = spec.hidden_size, spec.num_experts
        # Linear layers as torch initialises them: uniform within 1/sqrt(inputs).
        self.weight_in_NDF = nn.Parameter(uniform(num_networks, hidden, width, inputs=hidden))
        self.bias_in_NF = nn.Parameter(uniform(num_networks, width, inputs=hidden))
        self.weight_out_NFE = nn.Parameter(uniform(num_networks, width, experts, inputs=width))
        # Begin at "any top_k of the experts", so that the first steps need not learn the sparsity.
        prior = math.log(spec.top_k / max(1, experts - spec.top_k))
        self._num_experts = experts
        padded = -(-experts // WHOLE_VECTORS) * WHOLE_VECTORS
        self.bias_out_NP = nn.Parameter(torch.full((num_networks, padded), prior))
        self.register_buffer("mean_ND", torch.zeros(num_networks, hidden))
        self.register_buffer("scale_ND", torch.ones(num_networks, hidden))

    @property
    def bias_out_NE(self) -> Tensor:
        return self.bias_out_NP[:, : self._num_experts]

    def normalise_by(self, hidden_NBD: Tensor) -> None:
        """Fixes the input normalisation to this sample's mean and deviation of each feature."""
        measure_features(hidden_NBD, self.mean_ND, self.scale_ND)
        self.scale_ND.reciprocal_()

    def forward(self, hidden_NBD: Tensor) -> Tensor:
        """Logits `[N, B, E]`; their sigmoid is the chance that the expert is chosen."""
        input_NBD = (hidden_NBD - self.mean_ND[:, None]) * self.scale_ND[:, None]
        middle_NBF = torch.baddbmm(self.bias_in_NF[:, None], input_NBD, self.weight_in_NDF).relu()
        return torch.baddbmm(self.bias_out_NE[:, None], middle_NBF, self.weight_out_NFE)

    @torch.no_grad()
    def plain_weights(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One network as two linear layers `(in_DF, bias_F, out_FE, bias_E)`, float32.

        The normalisation is folded into the first layer, so that it costs nothing at run time:
        `((x - mean) * scale) W + b = x (scale W) + (b - (mean * scale) W)`, in double precision.
        """
        weight_DF = self.weight_in_NDF[number].double()
        scale_D, mean_D = self.scale_ND[number].double(), self.mean_ND[number].double()
        folded_DF = scale_D[:, None] * weight_DF
        folded_F = self.bias_in_NF[number].double() - mean_D @ folded_DF
        return (
            folded_DF.float(),
            folded_F.float(),
            self.weight_out_NFE[number].clone(),
            self.bias_out_NE[number].clone(),
        )


class PlainStack(PredictorStack):
    """The papers' networks: mlp, stride, pre-attention."""

    def __init__(self, spec: ModelSpec, edges: Sequence[NetworkSpec], *, width: int, loss: str):
        super().__init__()
        self.edges = list(edges)
        self.stack = NetworkStack(len(self.edges), spec, width=width)
        self.labels = [edge.label for edge in self.edges]
        self.needs = InputSpec(frozenset(edge.signal for edge in self.edges))
        self._loss = LOSSES[loss]

    def _inputs(self, batch: Batch) -> Tensor:
        return torch.stack([batch.states[edge.signal][edge.source] for edge in self.edges])

    def _chosen(self, batch: Batch) -> Tensor:
        return batch.chosen_LBK[[edge.target for edge in self.edges]]

    def normalise_by(self, batch: Batch) -> None:
        self.stack.normalise_by(self._inputs(batch))

    def losses(self, batch: Batch) -> Tensor:
        return self._loss(self.stack(self._inputs(batch)), self._chosen(batch))

    def hits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return top_k_hits(self.stack(self._inputs(batch)), self._chosen(batch))

    def export(self, spec: ModelSpec) -> Mapping[str, Predictor]:
        graphs: dict[str, dict[int, bytes]] = {}
        for number, edge in enumerate(self.edges):
            arrays = [tensor.cpu().numpy() for tensor in self.stack.plain_weights(number)]
            name = f"{edge.kind}_{edge.source}_to_{edge.target}"
            scale_D = self.stack.scale_ND[number].cpu().numpy()
            normaliser = (self.stack.mean_ND[number].cpu().numpy(), 1 / scale_D)
            graph = network_graph(*arrays, name=name, normaliser=normaliser)
            graphs.setdefault(edge.kind, {})[edge.source] = graph
        return {kind: FEED_FORWARD[kind](spec, own) for kind, own in graphs.items()}

    @torch.no_grad()
    def answers(self, batch: Batch) -> Iterator[ReferenceScores]:
        scores_NBE = self.stack(self._inputs(batch)).sigmoid().cpu().numpy()
        for edge, scores_BE in zip(self.edges, scores_NBE, strict=True):
            yield ReferenceScores(edge.kind, edge.signal, edge.source, {edge.target: scores_BE})


def measure_features(values_BD: Tensor, mean_D: Tensor, deviation_D: Tensor) -> None:
    """Writes mean and deviation of each feature, over B values, of each of several stacks."""
    mean_D.copy_(values_BD.mean(-2))
    deviation_D.copy_(values_BD.std(-2).clamp(min=SMALLEST_SCALE))


def uniform(*shape: int, inputs: int) -> Tensor:
    bound = 1 / math.sqrt(inputs)
    return torch.empty(shape).uniform_(-bound, bound)


def chosen_logits(logits_NBE: Tensor, chosen_NBK: Tensor) -> Tensor:
    """Logits of the chosen experts, `[N, B, K]`; 0 for the id E, no choice."""
    return nn.functional.pad(logits_NBE, (0, 1)).gather(-1, chosen_NBK)


def chosen_loss(logits_NBE: Tensor, chosen_NBK: Tensor) -> Tensor:
    """Binary cross-entropy of each expert against the chosen set, `[N]`, per token.

    Without the matrix of zeros and ones: softplus(x) for every expert, minus x for the chosen.
    """
    every_NB = nn.functional.softplus(logits_NBE).sum(-1)
    return (every_NB - chosen_logits(logits_NBE, chosen_NBK).sum(-1)).mean(-1)


def listwise_loss(logits_NBE: Tensor, chosen_NBK: Tensor) -> Tensor:
    """Softmax cross-entropy against the chosen set taken as equally likely, `[N]`, per token.

    Ranks a little better over long distances; its sigmoid is not a probability.
    """
    made_NB = (chosen_NBK < logits_NBE.size(-1)).to(logits_NBE.dtype).mean(-1)
    chosen_NB = chosen_logits(logits_NBE, chosen_NBK).mean(-1)
    return (logits_NBE.logsumexp(-1) * made_NB - chosen_NB).mean(-1)


LOSSES = {"bce": chosen_loss, "listwise": listwise_loss}


def top_k_hits(logits_NBE: Tensor, chosen_NBK: Tensor) -> tuple[Tensor, Tensor]:
    """Counts the chosen experts among the top_k scores, and all chosen ones, over the batch.

    `[N]` each; the id E, no choice, is left out.
    """
    best_NBK = logits_NBE.topk(chosen_NBK.size(-1), dim=-1).indices
    found_NBK = (best_NBK[..., None] == chosen_NBK[..., None, :]).any(-1)
    return found_NBK.sum((-2, -1)), (chosen_NBK < logits_NBE.size(-1)).sum((-2, -1))
