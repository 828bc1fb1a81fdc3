"""Training of small networks on stretches of a trace."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


def fit_stretches(
    family: Any, batches: Callable[..., Iterable[Any]], *, num_epochs: int
) -> list[float]:
    """Trains a family with AdamW; returns the loss of each step, summed over its networks.

    Args:
        batches: returns those of `epoch=`.
    """
    family.normalise_by(next(iter(batches(epoch=0))))
    optimiser = torch.optim.AdamW(family.parameters(), lr=1e-2)
    losses = []
    for epoch in range(num_epochs):
        for batch in batches(epoch=epoch):
            loss = family.losses(batch).sum()
            losses.append(loss.item())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return losses
