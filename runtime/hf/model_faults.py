"""Explains what is wrong with a checkpoint that Transformers cannot load or generate with."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from predictors.errors import MoecastError
from runtime.errors import CheckpointError
from runtime.store.model_check import CONFIG

SETTINGS = "generation_config.json"
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
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


def check_generation_settings(model: PreTrainedModel, folder: Path) -> None:
    """Raises CheckpointError for values in `generation_config.json` that nothing can be made of."""
    # Models that classify have none; a missing attribute reads as unset below.
    settings: Any = getattr(model, "generation_config", None)
    for name in NUMBERS:
        value = getattr(settings, name, None)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and math.isfinite(value) and abs(value) < 2**63):
            raise CheckpointError(f"{folder / SETTINGS}: {name} is {value!r:.100}, not a number")
    penalty = getattr(settings, "repetition_penalty", None)
    if penalty is not None and penalty <= 0:
        raise CheckpointError(
            f"{folder / SETTINGS}: repetition_penalty is {penalty}; it must be above 0"
        )
    if getattr(settings, "stop_strings", None) is not None:
        # Transformers' `generate` fails without a tokenizer, which only its caller has.
        raise CheckpointError(
            f"{folder / SETTINGS}: stop_strings is not supported; remove it and give strings where "
            "text is generated: `stop` of a request, or stop_strings with tokenizer in Python"
        )
    for name in TOKEN_IDS:
        value = getattr(settings, name, None)
        given = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and abs(token) < 2**63 for token in given):
            raise CheckpointError(f"{folder / SETTINGS}: {name} is {value!r:.100}, no token id")


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
