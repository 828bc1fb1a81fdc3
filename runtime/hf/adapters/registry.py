"""All ways of keeping routed experts, and which of them a module uses."""

from torch import nn

from runtime.hf.adapters.base import Kind
from runtime.hf.adapters.dense import Dense
from runtime.hf.adapters.interface import Interface
from runtime.hf.adapters.loop import Loop
from runtime.hf.adapters.members import Members
from runtime.hf.adapters.parallel import Parallel
from runtime.hf.adapters.stacked import Stacked

KINDS: tuple[Kind, ...] = (Interface(), Members(), Parallel(), Dense(), Loop(), Stacked())
"""In the order in which they are asked; a module belongs to the first that knows it."""


def kind_of(module: nn.Module) -> Kind | None:
    """How a module keeps routed experts, or None if it is no experts module."""
    return next((kind for kind in KINDS if kind.matches(module)), None)
