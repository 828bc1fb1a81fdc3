"""From logits to the chance that an expert is chosen: one scale and one shift for each forecast.

Shape suffixes: P forecasts (source and target), N tokens, E experts, K top_k.
"""

import torch
from torch import Tensor

ITERATIONS = 25
DAMPING = 1e-3
"""Newton's method on two numbers and a convex loss: a dozen steps reach single precision."""


def platt(logits_PNE: Tensor, chosen_PNK: Tensor) -> tuple[Tensor, Tensor]:
    """`(scale, shift)`, `[P]` each, of the least cross-entropy of `sigmoid(scale z + shift)` with
    being chosen, z the log-softmax over the experts (Platt scaling, with the softmax's temperature
    as its scale). Both keep the order of the experts of a token."""
    z_PM = logits_PNE.double().log_softmax(-1).flatten(1)
    wanted_PM = torch.zeros_like(logits_PNE, dtype=torch.double)
    wanted_PM = wanted_PM.scatter(-1, chosen_PNK, 1.0).flatten(1)
    scale_P1 = torch.ones(len(z_PM), 1, dtype=torch.double)
    shift_P1 = torch.full_like(scale_P1, 1.0)
    for _ in range(ITERATIONS):
        chance_PM = (scale_P1 * z_PM + shift_P1).sigmoid()
        error_PM, curve_PM = chance_PM - wanted_PM, chance_PM * (1 - chance_PM)
        gradient_P2 = torch.stack([(error_PM * z_PM).mean(1), error_PM.mean(1)], 1)
        a, b, d = ((curve_PM * z_PM**power).mean(1) for power in (2, 1, 0))
        hessian_P22 = torch.stack([torch.stack([a, b], 1), torch.stack([b, d], 1)], 1)
        hessian_P22 += (
            DAMPING
            * hessian_P22.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
            * (torch.eye(2, dtype=torch.double))
        )
        step_P2 = torch.linalg.solve(hessian_P22, gradient_P2).clamp(-2, 2)
        scale_P1 = (scale_P1 - step_P2[:, :1]).clamp(min=0.05)
        shift_P1 = shift_P1 - step_P2[:, 1:]
    return scale_P1[:, 0].float(), shift_P1[:, 0].float()
