"""The contract between an experts module, its experts' source, and the adapter that connects them.

A stripped module has placeholders where its experts' parameters were. They are never tensors: code
that does not know moecast would compute with a meta tensor and return wrong numbers.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, SupportsInt

import torch
from torch import Tensor, nn

from runtime.errors import CheckpointError
from runtime.store.ggml.matrix import ExpertWeights, QuantisedExpert
from runtime.store.weight_plan import FusedParameter


class ExpertSource(Protocol):
    """Provides experts to the experts modules of a model, such as an engine."""

    def ready(self, layer: int, wanted: list[int]) -> Iterator[dict[int, ExpertWeights]]:
        """Yield the wanted experts: all that are ready, valid until the next are taken."""

    def pin(self, layer: int, expert: int) -> ExpertWeights:
        """Return one expert's parameters, valid until the model requests its next expert."""


class LayerExperts:
    """The experts of one layer, as its experts module requests them.

    Args:
        home: device of the model, where experts may be on several. Modules whose tokens do not
            travel to an expert get its parameters copied there.
    """

    def __init__(self, source: ExpertSource, layer: int, *, home: torch.device | None = None):
        self.source = source
        """Provides the experts; may be replaced between forward passes."""
        self._layer = layer
        self._home = home

    def ready(self, wanted: list[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield the wanted experts (ascending), each when it is ready, on the model's device."""
        for batch in self.in_place(wanted):
            for expert, weights in batch.items():
                yield expert, self._to_home(weights)

    def in_place(self, wanted: list[int]) -> Iterator[dict[int, ExpertWeights]]:
        """Yield the same, at a time all that are ready, each on the device where it is."""
        return self.source.ready(self._layer, wanted)

    def pin(self, expert: int) -> dict[str, Tensor]:
        """Return the expert's parameters, valid until the model requests its next expert."""
        return self._to_home(self.source.pin(self._layer, expert))

    def _to_home(self, weights: ExpertWeights) -> dict[str, Tensor]:
        assert not isinstance(weights, QuantisedExpert), "this module computes with tensors"
        tensors = {name: weight for name, weight in weights.items() if isinstance(weight, Tensor)}
        assert len(tensors) == len(weights), "this module computes with tensors"
        if self._home is None:
            return tensors
        return {name: tensor.to(self._home) for name, tensor in tensors.items()}


class MissingParameterError(CheckpointError, AttributeError):
    """Code computed with a placeholder of parameters that are not in the model.

    It is an `AttributeError` too, so that `hasattr` and `getattr` with a default work.
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
            "experts_implementation='moecast', before it is closed, and not be computed, saved "
            "or converted directly"
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
        placeholder = next(
            value
            for value in (*args, *(kwargs or {}).values())
            if isinstance(value, MissingParameter)
        )
        placeholder._refuse()


class LazyParameter(MissingParameter):
    """Returns an expert's part when a model's own loop indexes it, `(experts, ...)[expert]`.

    Code that computes with several experts at once gets an error. The part is the arena's memory:
    it stays valid until another expert is requested.
    """

    def __init__(self, parameter: FusedParameter):
        super().__init__(parameter)
        self.served: LayerExperts | None = None

    def __getitem__(self, index: SupportsInt) -> Tensor:
        is_one = index.ndim == 0 if isinstance(index, Tensor) else isinstance(index, int)
        if self.served is None or not is_one or isinstance(index, bool):
            self._refuse()
        return self.served.pin(int(index))[self.parameter.name]


class LazyStackedParameter(LazyParameter):
    """Stands for `(experts * rows, columns)`, which a model's own loop splits before it indexes.

    The split is `view(-1, rows, columns)`.
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


def take_parameter(
    owner: nn.Module,
    attribute: str,
    bank: str,
    placeholder: type[MissingParameter] = MissingParameter,
    **known: Any,
) -> FusedParameter:
    """Puts a placeholder where the owner's own parameter is.

    Args:
        bank: name of the experts module.
        known: fields of the parameter that are not as the owner has them.
    """
    own = owner._parameters.pop(attribute)
    assert own is not None
    fields = {"name": attribute, "shape": tuple(own.shape), "dtype": own.dtype, **known}
    parameter = FusedParameter(bank, **fields)
    setattr(owner, attribute, placeholder(parameter))
    return parameter


class RouterOutput(NamedTuple):
    """Ids at or above the number of experts mean that a token skips this choice."""

    indices: Tensor
    """`(..., K)`, integers."""
    logits: Tensor | None
    """`(..., E)`, before any activation or bias."""
    weights: Tensor | None
    """`(..., K)`, what each chosen expert's output is multiplied by."""


def find_tensors(output: object) -> list[Tensor]:
    parts = output if isinstance(output, tuple) else (output,)
    return [part for part in parts if isinstance(part, Tensor)]


def read_routing(output: object) -> RouterOutput:
    """Read `(logits_TE, weights_TK, indices_TK)`, the output of nearly all routers.

    Indices are recognised by their dtype, because some models add a bias to the logits.

    Raises:
        CheckpointError: the output has no indices.
    """
    indices = logits = weights = None
    floats: list[Tensor] = []
    for part in find_tensors(output):
        if part.is_floating_point():
            floats.append(part)
        elif indices is None:
            indices = part
    if indices is None:
        raise CheckpointError("this model's router does not return the chosen experts")
    for part in floats:
        if part.shape == indices.shape:
            weights = part if weights is None else weights
        elif part.shape[-1] != indices.shape[-1]:
            logits = part if logits is None else logits
    return RouterOutput(indices, logits, weights)


class ExpertsAdapter:
    """Recognised by the structure of the module, never by the name of a model."""

    name: ClassVar[str]
    router_inside: ClassVar[bool] = False
    """True if the router is inside the experts module."""

    def matches(self, module: nn.Module) -> bool:
        """Return whether a module keeps its experts this way, stripped or not."""
        raise NotImplementedError

    def num_experts(self, module: nn.Module) -> int:
        """Return the number of experts with parameters; a router's higher ids mean "skip"."""
        return int(module.num_experts)

    def strip(self, bank: str, module: nn.Module) -> list[FusedParameter]:
        """Takes the experts' parameters out of the module named `bank`, which is on meta."""
        raise NotImplementedError

    def attach(self, module: nn.Module, served: LayerExperts) -> None:
        """Lets the stripped module compute with the experts of `served`.

        By default the lazy placeholders of the module and of what is in it fetch them.
        """
        for part in module.modules():
            for value in vars(part).values():
                if isinstance(value, LazyParameter):
                    value.served = served

    def top_k(self, _router: nn.Module) -> int | None:
        """Return the experts per token, or None if the configuration says so instead."""
        return None

    def routing(self, output: object, _router: nn.Module, _parent: nn.Module, /) -> RouterOutput:
        """Return the router's choice, given its output and the module that contains it."""
        return read_routing(output)


def has_class_suffix(module: nn.Module, suffix: str) -> bool:
    """Return whether the module's class name ends so, shared experts excepted."""
    name = type(module).__name__
    return name.endswith(suffix) and "Shared" not in name


def find_parameters(module: nn.Module, dim: int) -> dict[str, Tensor | MissingParameter]:
    """The module's own parameters of `dim` dimensions, or what stands in their place."""
    attributes = {**module._parameters, **vars(module)}
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, Tensor | MissingParameter) and len(value.shape) == dim
    }
