"""What stands in a stripped module where its experts' parameters were.

Never a tensor: a meta tensor left there would let code that does not know moecast run and return
wrong numbers without a word.
"""

from typing import Any, NoReturn, SupportsInt

import torch
from torch import Tensor, nn

from runtime.errors import CheckpointError
from runtime.hf.adapters.served import LayerExperts
from runtime.store.recipe import FusedParameter


class MissingParameterError(CheckpointError, AttributeError):
    """Somebody computed with parameters that are not there.

    An `AttributeError` too, so that `hasattr` and `getattr` with a default can ask what a
    placeholder has.
    """


class MissingParameter:
    """Has a parameter's shape and dtype, and refuses every computation."""

    _is_hf_initialized = True
    """Some models' initialisation fills their experts from the block above them; not this."""

    def __init__(self, parameter: FusedParameter):
        self.parameter = parameter
        self.shape = torch.Size(parameter.shape)
        self.dtype = parameter.dtype

    def _refuse(self) -> NoReturn:
        raise MissingParameterError(
            f"{self.parameter.target} is served from moecast's arena; this model must run with "
            "experts_implementation='moecast', not be computed, saved or converted directly"
        )

    def __getitem__(self, index: SupportsInt) -> Tensor:
        self._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, _function: object, _types: object, args: tuple = (), kwargs: dict | None = None
    ) -> NoReturn:
        found = next(
            value
            for value in (*args, *(kwargs or {}).values())
            if isinstance(value, MissingParameter)
        )
        found._refuse()


class LazyParameter(MissingParameter):
    """Gives an expert's own part when a model's own loop indexes it, `(experts, ...)[expert]`.

    Code that computes with several at once is refused.

    The part is the arena's memory: it stays valid until another expert is asked for.
    """

    def __init__(self, parameter: FusedParameter):
        super().__init__(parameter)
        self.served: LayerExperts | None = None

    def __getitem__(self, index: SupportsInt) -> Tensor:
        is_one = index.ndim == 0 if isinstance(index, Tensor) else isinstance(index, int)
        if self.served is None or not is_one or isinstance(index, bool):
            self._refuse()
        return self.served.hold(int(index))[self.parameter.name]


class LazyStackedParameter(LazyParameter):
    """For parameters kept as `(experts * rows, columns)`, which the model's own loop splits with
    `view(-1, rows, columns)` before it indexes an expert.
    """

    def view(self, *shape: Any) -> "LazyStackedParameter":
        """Itself: it is indexed by expert already.

        Raises:
            CheckpointError: for any other split.
        """
        wanted = tuple(shape[0] if len(shape) == 1 else shape)
        if wanted[1:] != tuple(self.parameter.shape[1:]):
            self._refuse()
        return self


def replace_parameter(owner: nn.Module, name: str, placeholder: MissingParameter) -> FusedParameter:
    """Puts the placeholder where the owner's own parameter `name` is."""
    del owner._parameters[name]
    setattr(owner, name, placeholder)
    return placeholder.parameter


def connect_placeholders(module: nn.Module, served: LayerExperts) -> None:
    """Connects the lazy placeholders of a module and of what is in it."""
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, LazyParameter):
                value.served = served
