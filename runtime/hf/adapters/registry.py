"""All ways of keeping routed experts, and which of them a module uses."""

from torch import nn

from runtime.hf.adapters.base import ExpertsAdapter
from runtime.hf.adapters.dense import DenseAdapter
from runtime.hf.adapters.interface import InterfaceAdapter
from runtime.hf.adapters.loop import LoopAdapter
from runtime.hf.adapters.members import MembersAdapter
from runtime.hf.adapters.parallel import ParallelAdapter
from runtime.hf.adapters.stacked import StackedAdapter

ADAPTERS: tuple[ExpertsAdapter, ...] = (
    InterfaceAdapter(),
    MembersAdapter(),
    ParallelAdapter(),
    DenseAdapter(),
    LoopAdapter(),
    StackedAdapter(),
)
"""In the order in which they are asked; a module belongs to the first that knows it."""


def find_adapter(module: nn.Module) -> ExpertsAdapter | None:
    """How a module keeps routed experts, or None if it is no experts module."""
    return next((kind for kind in ADAPTERS if kind.matches(module)), None)
