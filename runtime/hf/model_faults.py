"""Explains what is wrong with a checkpoint that Transformers cannot load or generate with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from predictors.errors import MoecastError
from runtime.errors import CheckpointError
from runtime.store.model_check import CONFIG

SETTINGS = "generation_config.json"
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


@contextmanager
def explain_loading(folder: Path) -> Iterator[None]:
    """Turns exceptions of Transformers and PyTorch about a model's files into CheckpointError.

    Errors of the disk and of memory stay what they are.
    """
    try:
        yield
    except (MoecastError, *OUT_OF_MEMORY):
        raise
    # Model classes raise exceptions of every type for configurations that they do not expect.
    except Exception as error:
        is_system_error = isinstance(error, OSError) and error.errno is not None
        if is_system_error or "allocate memory" in str(error):
            raise
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder}: Transformers cannot load it as its {CONFIG} and {SETTINGS} say "
            f"({type(error).__name__}: {reason}); fetch the model again"
        ) from error


def check_tokens(tokens: Sequence[int], config: PreTrainedConfig) -> None:
    """Raises CheckpointError if the tokenizer gave a token that the model does not know.

    PyTorch would fail without a cause on a CPU, and lose the whole device on a GPU.
    """
    size = getattr(config.get_text_config(), "vocab_size", None)
    largest = max(tokens, default=0)
    if size is not None and largest >= size:
        raise CheckpointError(
            f"the tokenizer gives the token {largest}, the model knows {size} tokens: the files of "
            "the tokenizer are another model's; copy this model's own into its folder"
        )
