"""The forward passes of a model: the modules that run them, and code around each."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def find_generating_parts(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that `generate` calls, each with forward passes of its own.

    They are an encoder and its decoder; otherwise the model, or parts that generate separately. An
    example of the latter is qwen3_omni_moe, with a thinker and a talker.
    """
    if model.config.is_encoder_decoder:
        return [model.get_encoder(), model.get_decoder()]
    if type(model).forward is not nn.Module.forward:
        return [model]
    children = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return [child for child in children if child.can_generate()]


class ForwardWrapper:
    """Calls `begin` before a module's forward pass and `end` after it, however it ends.

    A pair of hooks would not do: PyTorch calls none after a Ctrl-C.
    """

    def __init__(
        self, module: nn.Module, begin: Callable[[tuple, dict], None], end: Callable[[], object]
    ):
        self._module = module
        self._before = vars(module).get("forward")
        self._is_removed = False
        forward = module.forward

        @functools.wraps(forward)
        def around(*args: Any, **kwargs: Any) -> Any:
            if self._is_removed:
                return forward(*args, **kwargs)
            try:
                begin(args, kwargs)
                return forward(*args, **kwargs)
            finally:
                end()

        module.forward = self._around = around

    def remove(self) -> None:
        """The module is as it was; others that came around it later stay."""
        self._is_removed = True
        if self._module.forward is not self._around:
            return
        if self._before is None:
            del self._module.forward
        else:
            self._module.forward = self._before
