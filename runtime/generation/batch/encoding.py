"""A model's tokenizer, where it brings one, and what the model takes."""

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from runtime.generation.batch.errors import InputError
from runtime.generation.batch.prompts import Encoder
from runtime.generation.chat_template import render

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase | None:
    """None where the folder has none: prompts are then token ids, and results have no text."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def encoder_of(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> Encoder:
    """How prompts for a model of this configuration are read."""
    text = config.get_text_config()
    return Encoder(
        of_text=_without if tokenizer is None else lambda one: list(tokenizer(one)["input_ids"]),
        of_messages=_without if tokenizer is None else lambda one: render(one, tokenizer),
        vocabulary=text.vocab_size,
        context=getattr(text, "max_position_embeddings", None),
    )


def decoder_of(tokenizer: PreTrainedTokenizerBase | None) -> Callable[[list[int]], str] | None:
    """From new tokens to text."""
    if tokenizer is None:
        return None
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))


def _without(_: object) -> NoReturn:
    raise InputError("this model has no tokenizer; give token ids, `tokens`")
