"""Explains what is wrong with a checkpoint that Transformers cannot load or generate with."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from predictors.errors import MoecastError, describe_error
from runtime.errors import CheckpointError
from runtime.store.model_check import CONFIG, SETTINGS, list_names

OUT_OF_MEMORY = ("out of memory", "allocate memory")
"""Words of PyTorch's errors about memory that have no class: on CPUs, MPS and within kernels."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY):
        return True
    return isinstance(error, (MemoryError, torch.OutOfMemoryError))


@contextmanager
def explain_loading(folder: Path) -> Iterator[None]:
    """Turns exceptions of Transformers and PyTorch about a model's files into CheckpointError.

    Errors of the disk and of memory stay what they are.
    """
    try:
        yield
    except MoecastError:
        raise
    # Model classes raise exceptions of every type for configurations that they do not expect.
    except Exception as error:
        is_system_error = isinstance(error, OSError) and error.errno is not None
        if is_system_error or is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{folder}: Transformers cannot load it as its {CONFIG} and {SETTINGS} say "
            f"({describe_error(error)}); fetch the model again"
        ) from error


@contextmanager
def without_tables() -> Iterator[None]:
    """Keeps Transformers from writing a table of tensors that are refused in one line.

    What it says of conversions that failed is its alone, and stays.
    """

    def is_told(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "LOAD REPORT" not in text or "CONVERSION" in text

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_told)
    try:
        yield
    finally:
        logger.removeFilter(is_told)


def refuse_mismatched(folder: Path, found: Iterable[tuple[str, Any, Any]]) -> None:
    """Raises CheckpointError for tensors of other shapes than the configuration says."""
    if mismatched := sorted(found, key=lambda one: dot_natural_key(one[0])):
        raise CheckpointError(
            f"{folder}: the configuration does not fit the weights: "
            + list_names(
                f"{name} is {tuple(stored)} in the checkpoint, {tuple(wanted)} by it"
                for name, stored, wanted in mismatched
            )
        )


def refuse_missing(folder: Path, names: Iterable[str]) -> None:
    """Raises CheckpointError for parameters that a checkpoint has no tensor for.

    Transformers fills them with random numbers, other ones at each load, and warns.
    """
    if missing := sorted(names, key=dot_natural_key):
        raise CheckpointError(
            f"{folder} has no tensor for {list_names(missing)}; fetch the model again, or look at "
            "what wrote it: does its configuration (tie_word_embeddings, for one) fit its weights?"
        )


def check_generates(model: type[PreTrainedModel], *, in_batches: bool = False) -> None:
    """Raises CheckpointError if a model's class generates nothing, or no batches whose rows end."""
    if not model.can_generate():
        raise CheckpointError(
            f"{model.__name__} computes logits and generates nothing: load it in Python with "
            "moecast.load and call it, or compare it by `moecast verify`"
        )
    if in_batches and model.generate is not GenerationMixin.generate:
        raise CheckpointError(
            f"{model.__name__} does not generate token by token, as batches do: use "
            "`moecast generate`, or the model's own `generate`"
        )


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


def check_length(num_prompt: int, max_new_tokens: int, context: int | None) -> None:
    """Raises CheckpointError if prompt and answer do not fit in the model's context."""
    if context is not None and num_prompt + max_new_tokens > context:
        raise CheckpointError(
            f"{num_prompt} prompt tokens and max_new_tokens={max_new_tokens} exceed the model's "
            f"context of {context}; shorten the prompt or lower max_new_tokens"
        )
