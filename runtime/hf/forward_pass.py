"""The forward passes of a model: the modules that run them, code around each, and their inputs."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.errors import CheckpointError

NO_TOKEN = -1
"""Stands for a position that was given as an embedding."""


def find_generating_parts(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that `generate` calls, each of which runs forward passes.

    They are an encoder and its decoder; otherwise the model, or parts that generate separately. An
    example of the latter is qwen3_omni_moe, with a thinker and a talker.
    """
    if model.config.is_encoder_decoder:
        return [model.get_encoder(), model.get_decoder()]
    if type(model).forward is not nn.Module.forward:
        return [model]
    children = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return [child for child in children if child.can_generate()]


class ForwardReplacement:
    """Computes `forward` in place of a module's own forward pass, until it is removed."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        self._module = module
        self._before = vars(module).get("forward")
        self._is_removed = False
        own = module.forward

        @functools.wraps(own)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return (own if self._is_removed else forward)(*args, **kwargs)

        module.forward = self._replacement = replacement

    def remove(self) -> None:
        """The module is as it was; others that came around it later stay."""
        self._is_removed = True
        if self._module.forward is not self._replacement:
            return
        if self._before is None:
            del self._module.forward
        else:
            self._module.forward = self._before


def surround_forward(
    module: nn.Module, begin: Callable[[tuple, dict], None], end: Callable[[], object]
) -> ForwardReplacement:
    """Call `begin` before a module's forward passes and `end` after each, however it ends.

    A pair of hooks would not do: PyTorch calls none after a Ctrl-C. Nor would a generator's
    context, which a Ctrl-C may enter without leaving it.
    """
    forward = module.forward

    def surrounded(*args: Any, **kwargs: Any) -> Any:
        try:
            begin(args, kwargs)
            return forward(*args, **kwargs)
        finally:
            end()

    return ForwardReplacement(module, surrounded)


def find_tokens(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Token ids `(batch, sequence)`, integers; `NO_TOKEN` everywhere for `inputs_embeds`.

    Raises:
        CheckpointError: neither ids nor embeddings.
    """
    given = {"input_ids": args[0], **kwargs} if args else kwargs
    # A diffusion model's step is given the canvas alone, which it calls its decoder's.
    for prefix in ("", "decoder_"):
        if (tokens := given.get(f"{prefix}input_ids")) is not None:
            return tokens
        if (embeddings := given.get(f"{prefix}inputs_embeds")) is not None:
            return torch.full(embeddings.shape[:2], NO_TOKEN, dtype=torch.int64)
    raise CheckpointError("moecast serves models that are given input_ids or inputs_embeds")
