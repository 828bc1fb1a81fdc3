"""Norms and rotations of single tokens on a CPU in one call each, with the bits of the model's own.

A step of one token computes four norms and two rotations in each layer, on a few thousand numbers.
They are some forty calls of PyTorch, and take longer than the router. Those that a model computes
in one of the usual ways, as seen from their bits on random rows, are computed by `small_steps.h`.
"""

import logging
from collections.abc import Callable, Hashable
from copy import copy
from functools import cache, wraps
from inspect import signature
from itertools import product
from sys import modules
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runtime.hf.linear import SINGLE_ROWS

try:
    from runtime.store.ggml.products import normalise, rotate
except ImportError:  # installed without compiled code, or with that of an earlier version
    normalise = rotate = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

MOST_NUMBERS = 1 << 15
"""PyTorch computes more of them with several threads."""
TRIED_ROWS = 64
EPSILONS = ("variance_epsilon", "eps")
"""Names of a norm's attribute."""
ROTATION = "apply_rotary_pos_emb"
"""Name of the function in Transformers' modules of models."""
Rotate = Callable[..., Any]


def convert_small_steps(model: nn.Module) -> None:
    """Let the model's norms and rotations of single tokens be computed as here; no bit changes.

    A rotation is a function of a module of Transformers, for all models of the process.
    """
    if normalise is None:
        return
    ways: dict[Hashable, Way | None] = {}
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            convert_norm(module, ways)
        code = modules.get(type(module).__module__)
        function = getattr(code, ROTATION, None)
        if function is not None and not hasattr(function, "moecast_rotates"):
            setattr(code, ROTATION, own_rotation(function))


class Way(NamedTuple):
    """A way to compute a norm."""

    dtype: torch.dtype
    epsilon: float
    rounds_twice: bool
    """Before it is multiplied by the weights, too, as in Llama; not in gpt-oss."""
    adds_one: bool
    """To the weights, as in Gemma."""


class OwnNorm(nn.Module):
    """Goes before a model's class of norms, which computes what is not computed here."""

    moecast_way: Way

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        y = self.normalise(args[0], self.weight) if len(args) == 1 and not kwargs else None
        return super().forward(*args, **kwargs) if y is None else y

    def normalise(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """Return the norm of each row of `x`, `(..., K)`; None: the model has to compute it."""
        dtype, epsilon, rounds_twice, adds_one = self.moecast_way
        if (
            type(x) is not Tensor
            or x.dtype is not dtype
            or x.numel() > MOST_NUMBERS
            or x.shape[-1:] != weight.shape
            or torch.is_grad_enabled()
            or not are_alike(x, weight)
        ):
            return None
        y, num_columns = torch.empty_like(x), len(weight)
        is_done = normalise(
            x.data_ptr(),
            x.numel() // num_columns,
            num_columns,
            weight.data_ptr(),
            epsilon,
            rounds_twice,
            adds_one,
            y.data_ptr(),
            dtype is torch.float32,
        )
        return y if is_done else None


@cache
def _own_class(cls: Any) -> type[OwnNorm]:
    return type(cls.__name__, (OwnNorm, cls), {"__module__": cls.__module__})


def are_alike(*tensors: Tensor) -> bool:
    """Return whether tensors have one dtype, and their numbers lie in memory one after another."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        if not (tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous()):
            return False
    return dtype in SINGLE_ROWS


def convert_norm(module: nn.Module, ways: dict[Hashable, Way | None]) -> None:
    """Let a norm be computed as here, if it is of one of the ways, as seen from its bits.

    Args:
        ways: those of norms that were tried before; None: none of them.
    """
    weight, settings = module._parameters.get("weight"), vars(module)
    epsilons = [settings[name] for name in EPSILONS if name in settings]
    if (
        weight is None
        or weight.ndim != 1
        or len(module._parameters) > 1
        or [type(epsilon) for epsilon in epsilons] != [float]
        or isinstance(module, OwnNorm)
        or len(signature(module.forward).parameters) > 1
    ):
        return
    own = [f"{name}={value}" for name, value in settings.items() if not name.startswith("_")]
    key = (type(module), weight.shape, weight.dtype, *own)
    if key not in ways:
        ways[key] = _find_way(module, weight, epsilons[0])
    if (way := ways[key]) is not None:
        module.__class__ = _own_class(module.__class__)
        module.moecast_way = way


@torch.no_grad()
def _find_way(module: nn.Module, weight: Tensor, epsilon: float) -> Way | None:
    """Compare a norm's results with those of each way, for small and large numbers."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        random = torch.randn(1 + TRIED_ROWS, weight.numel(), generator=generator).to(weight.dtype)
        x = random[1:] * torch.logspace(-4, 3, TRIED_ROWS, dtype=weight.dtype)[:, None]
    tried: Any = copy(module)
    tried._parameters = {"weight": nn.Parameter(random[0], requires_grad=False)}
    parts = [part[None] for size in (1, 2) for part in x.split(size)]
    try:
        cases = [(rows, tried.forward(rows)) for rows in parts]
    except (TypeError, ValueError, RuntimeError) as error:  # it takes other rows
        log.debug("%s is left as it is: %s", type(module).__name__, error)
        return None
    tried.__class__ = _own_class(tried.__class__)
    for adds_one, rounds_twice in product((False, True), (True, False)):
        tried.moecast_way = way = Way(weight.dtype, epsilon, rounds_twice, adds_one)
        if all(_are_equal(tried.normalise(rows, tried.weight), y) for rows, y in cases):
            return way
    return None


def _are_equal(own: Tensor | None, expected: Tensor) -> bool:
    return own is not None and own.dtype is expected.dtype and torch.equal(own, expected)


def own_rotation(function: Rotate) -> Rotate:
    """Return a function that rotates queries and keys of one token as the given one does.

    Functions of some models take other arguments: they are left to them.
    """

    @wraps(function)
    def rotate_both(*args: Any, **kwargs: Any) -> Any:
        own_q = own_k = None
        if len(args) == 4 and not kwargs and not torch.is_grad_enabled():
            q, k, cos, sin = args
            if (
                set(map(type, args)) == {Tensor}
                and are_alike(*args)
                and cos.numel() == cos.shape[-1]
                and _rotates_alike(function, q.shape, k.shape, cos.shape, sin.shape, q.dtype)
            ):
                own_q, own_k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        return function(*args, **kwargs) if own_q is None or own_k is None else (own_q, own_k)

    rotate_both.moecast_rotates = True  # type: ignore[attr-defined]
    return rotate_both


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    y, num_columns = torch.empty_like(x), x.shape[-1]
    is_done = rotate(
        x.data_ptr(),
        x.numel() // num_columns,
        num_columns,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.numel(),
        y.data_ptr(),
        x.dtype is torch.float32,
    )
    return y if is_done else None


@cache
@torch.no_grad()
def _rotates_alike(function: Rotate, *shapes_and_dtype: Any) -> bool:
    """Compare a function with the kernel, on random numbers of these shapes and this dtype."""
    *shapes, dtype = shapes_and_dtype
    if shapes[2] != shapes[3]:
        return False
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        q, k, cos, sin = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    own = (_rotate(q, cos, sin), _rotate(k, cos, sin))
    return all(map(_are_equal, own, function(q, k, cos, sin)))
