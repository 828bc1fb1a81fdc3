"""The logits of a whole prompt from the forward pass in which `generate` reads it.

`generate` has the logits of the last token only. Asked for all, the output layer's product of the
last row may differ in its last bits from the product of that row alone: the row is replaced by the
latter, so that the answer is that of a request without log-probabilities.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from greenlet import getcurrent
from torch import Tensor, nn
from transformers import PreTrainedModel


@contextmanager
def reading_prompt_logits(
    model: PreTrainedModel, take: Callable[[Tensor], None]
) -> Iterator[dict[str, Any]]:
    """Within the context, `take` gets the logits TV of this coroutine's first forward pass.

    Yields the options that `generate` needs for it. Other coroutines may use the model meanwhile.
    """
    own, is_read = getcurrent(), False
    head = model.get_output_embeddings() if model._supports_logits_to_keep() else None

    def is_prompt() -> bool:
        return not is_read and getcurrent() is own

    def keep_last_row(module: nn.Module, inputs: tuple[Tensor, ...], logits_BTV: Tensor) -> None:
        if is_prompt() and logits_BTV.shape[1] > 1:
            logits_BTV[:, -1:] = module.forward(inputs[0][:, -1:])

    def read(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal is_read
        if is_prompt():
            is_read = True
            take(output.logits[0])

    with ExitStack() as hooks:
        if head is not None:
            hooks.callback(head.register_forward_hook(keep_last_row).remove)
        hooks.callback(model.register_forward_hook(read).remove)
        yield {} if head is None else {"logits_to_keep": 0}
