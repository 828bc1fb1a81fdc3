"""Calibration: logits to the probability that an expert is chosen, by a scale and a shift.

Shape suffixes: P forecasts (source and target), N tokens, E experts, K top_k.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

ITERATIONS = 40
DAMPING = 1e-6
HALVINGS = 12
"""Newton's method on two numbers and a convex loss. A step that would raise the loss is halved:
undamped, Newton runs away from a forecast that is nearly always right."""
CLOSE_ENOUGH = 1e-6
"""Largest final step, in units of scale and shift: single precision."""
SMALLEST_SCALE = 1e-3
"""A scale of 0 or below would not keep the order."""


def platt(logits_PNE: Tensor, chosen_PNK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `(scale, shift)`, `[P]` each, fitted by Platt scaling.

    They minimise the cross-entropy of `sigmoid(scale z + shift)` against the chosen experts, with
    z the log-softmax over the experts; the scale is the softmax's temperature. The order of a
    token's experts stays.
    """
    z_PM = logits_PNE.double().log_softmax(-1).flatten(1)
    # The id E is no choice.
    wanted_PNE = torch.zeros_like(logits_PNE, dtype=torch.double)
    wanted_PM = pad(wanted_PNE, (0, 1)).scatter(-1, chosen_PNK, 1.0)[..., :-1].flatten(1)
    # About the middle the two numbers hardly depend on each other, and the steps are straight.
    middle_P1 = z_PM.mean(1, keepdim=True)
    z_PM = z_PM - middle_P1
    # From saying the same of every expert, the first steps go up a slope that bends little.
    share_P = wanted_PM.mean(1).clamp(1e-6, 1 - 1e-6)
    found_P2 = torch.stack([torch.full_like(share_P, SMALLEST_SCALE), share_P.logit()], 1)
    loss_P = cross_entropy(found_P2, z_PM, wanted_PM)
    for _ in range(ITERATIONS):
        step_P2 = newton_step(found_P2, z_PM, wanted_PM)
        if step_P2.abs().max() < CLOSE_ENOUGH:
            break
        for _ in range(HALVINGS):
            tried_P2 = found_P2 - step_P2
            tried_P = cross_entropy(tried_P2, z_PM, wanted_PM)
            better_P = (tried_P <= loss_P) & (tried_P2[:, 0] >= SMALLEST_SCALE)
            if better_P.all():
                break
            step_P2 = torch.where(better_P[:, None], step_P2, step_P2 / 2)
        found_P2 = torch.where(better_P[:, None], tried_P2, found_P2)
        loss_P = torch.where(better_P, tried_P, loss_P)
    scale_P, shift_P = found_P2.unbind(1)
    return scale_P.float(), (shift_P - scale_P * middle_P1[:, 0]).float()


def cross_entropy(found_P2: Tensor, z_PM: Tensor, wanted_PM: Tensor) -> Tensor:
    """`[P]`: mean over all pairs."""
    said_PM = found_P2[:, :1] * z_PM + found_P2[:, 1:]
    return (softplus(said_PM) - wanted_PM * said_PM).mean(1)


def newton_step(found_P2: Tensor, z_PM: Tensor, wanted_PM: Tensor) -> Tensor:
    """`[P, 2]`, to be subtracted."""
    chance_PM = (found_P2[:, :1] * z_PM + found_P2[:, 1:]).sigmoid()
    error_PM, curve_PM = chance_PM - wanted_PM, chance_PM * (1 - chance_PM)
    gradient_P2 = torch.stack([(error_PM * z_PM).mean(1), error_PM.mean(1)], 1)
    a_P, b_P, d_P = ((curve_PM * z_PM**power).mean(1) for power in (2, 1, 0))
    hessian_P22 = torch.stack([torch.stack([a_P, b_P], 1), torch.stack([b_P, d_P], 1)], 1)
    eye = DAMPING * torch.eye(2, dtype=torch.double)
    size_P = hessian_P22.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-12)
    return torch.linalg.solve(hessian_P22 + size_P[:, None, None] * eye, gradient_P2)
