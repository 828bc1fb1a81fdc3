"""All learned networks of a run as one stack: one batched product does every layer's work.

Shape suffixes: L layers, N networks, B batch, D hidden size, F width, E experts, K top_k.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from predictors.registry import LEARNED
from predictors.spec import ModelSpec
from train.errors import TrainError

SMALLEST_SCALE = 1e-3
"""Features that hardly vary in the trace are not blown up by more than a thousand."""


@dataclass(frozen=True)
class Edge:
    """One network: what it is part of, the layer it reads, the layer whose experts it forecasts."""

    kind: str
    source: int
    target: int

    @property
    def label(self) -> str:
        return f"{self.kind}/layer_{self.target:02d}"


def edges(spec: ModelSpec, kinds: Sequence[str]) -> list[Edge]:
    """Every network of these kinds of learned predictors, kind by kind, bottom layer first."""
    found = [
        Edge(kind, source, source + LEARNED[kind].horizon)
        for kind in kinds
        for source in range(spec.num_layers - LEARNED[kind].horizon)
    ]
    if not found:
        raise TrainError(
            f"{spec.model_id} has {spec.num_layers} layers with experts: "
            f"no layer lies ahead of another for {', '.join(kinds)}"
        )
    return found


class NetworkStack(nn.Module):
    """N networks `hidden -> ReLU(width) -> experts` (promoe 6.3), each with weights of its own."""

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
        self.bias_out_NE = nn.Parameter(torch.full((num_networks, experts), prior))
        self.register_buffer("mean_ND", torch.zeros(num_networks, hidden))
        self.register_buffer("scale_ND", torch.ones(num_networks, hidden))

    def normalise_by(self, hidden_NBD: Tensor) -> None:
        """Fixes the input normalisation to this sample's mean and deviation of each feature."""
        deviation_ND = hidden_NBD.std(dim=1)
        self.mean_ND.copy_(hidden_NBD.mean(dim=1))
        self.scale_ND.copy_(deviation_ND.clamp(min=SMALLEST_SCALE).reciprocal())

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


def uniform(*shape: int, inputs: int) -> Tensor:
    bound = 1 / math.sqrt(inputs)
    return torch.empty(shape).uniform_(-bound, bound)


def chosen_loss(logits_NBE: Tensor, chosen_NBK: Tensor) -> Tensor:
    """Binary cross-entropy of each expert against the chosen set, `[N]`, per token.

    Without the matrix of zeros and ones: softplus(x) for every expert, minus x for the chosen.
    """
    every_NB = nn.functional.softplus(logits_NBE).sum(-1)
    return (every_NB - logits_NBE.gather(-1, chosen_NBK).sum(-1)).mean(-1)


def listwise_loss(logits_NBE: Tensor, chosen_NBK: Tensor) -> Tensor:
    """Softmax cross-entropy against the chosen set taken as equally likely, `[N]`, per token.

    Ranks a little better over long distances; its sigmoid is not a probability.
    """
    return (logits_NBE.logsumexp(-1) - logits_NBE.gather(-1, chosen_NBK).mean(-1)).mean(-1)


def top_k_hits(logits_NBE: Tensor, chosen_NBK: Tensor) -> Tensor:
    """How many chosen experts are among the best scored top_k, summed over the batch, `[N]`."""
    best_NBK = logits_NBE.topk(chosen_NBK.size(-1), dim=-1).indices
    return (best_NBK[..., None] == chosen_NBK[..., None, :]).any(-1).sum((-2, -1))
