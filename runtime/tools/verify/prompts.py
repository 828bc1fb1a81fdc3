"""The token ids that both sides are given."""

import json
from pathlib import Path
from random import Random
from typing import Any

from transformers import AutoTokenizer

from predictors.errors import MoecastError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
)
RANDOM_LENGTHS = (7, 16, 33)
"""Tokens of the random prompts: below, at and above what kernels take in one go."""
FIRST_TOKEN = 4
"""Random ids begin here: padding, beginning, end and unknown come before."""


def token_prompts(folder: Path, prompts: list[str], *, seed: int) -> tuple[list[list[int]], str]:
    """Token ids, and what they are, in words.

    Without a tokenizer beside the model they are random.

    Raises:
        MoecastError: a prompt without tokens.
    """
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokens = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
        for prompt, ids in zip(prompts, tokens, strict=True):
            if not ids:
                raise MoecastError(f"prompts: {prompt!r} has no tokens")
        return tokens, f"{len(tokens)} prompts as text"
    vocabulary = vocabulary_size(json.loads((folder / "config.json").read_text()))
    random = Random(seed)
    tokens = [
        [random.randrange(FIRST_TOKEN, vocabulary) for _ in range(length)]
        for length in RANDOM_LENGTHS
    ]
    return tokens, f"{len(tokens)} prompts of random tokens, seed {seed}: there is no tokenizer"


def vocabulary_size(config: dict[str, Any]) -> int:
    """Of the text part of a `config.json`.

    Raises:
        MoecastError: it does not say.
    """
    for part in (config, config.get("text_config"), config.get("llm_config")):
        if isinstance(part, dict) and isinstance(part.get("vocab_size"), int):
            return part["vocab_size"]
    raise MoecastError("config.json has no vocab_size, and there is no tokenizer beside the model")
