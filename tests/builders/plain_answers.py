"""What plain Transformers generates with a model of `speaking_model`: the answers to expect."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from runtime.config import BUILTIN_MODELS
from runtime.generation.chat_template import end_of_turn
from runtime.serving.served_model import ModelInfo
from tests.builders.models import plain_eager

TOKENIZER = AutoTokenizer.from_pretrained(BUILTIN_MODELS / "qwen2_moe_tiny")


def ids(prompt: str) -> list[int]:
    return TOKENIZER(prompt)["input_ids"]


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def model_info(**more: Any) -> ModelInfo:
    """A served model with the tokenizer, known by two names, of 200 tokens."""
    sizes = {"vocab_size": 8192, "context_length": 200, "logit_bytes": 16384}
    names = {"name": "m", "aliases": frozenset({"alias"}), "tokenizer": TOKENIZER}
    ends = {"eos_token_ids": frozenset({0}), "end_of_turn": end_of_turn(TOKENIZER)}
    return ModelInfo(**{**sizes, **names, **ends, **more})


class PlainAnswers:
    """Generation by plain Transformers in float32, greedy unless options say otherwise."""

    def __init__(self, folder: Path):
        self.model = plain_eager(folder, dtype=torch.float32)

    def tokens(self, prompt: list[int], number: int, **options: Any) -> list[int]:
        inputs = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(inputs), "do_sample": False, **options}
        tokens = self.model.generate(inputs, max_new_tokens=number, **options)
        return tokens[0, len(prompt) :].tolist()

    def text(self, prompt: str, number: int, **options: Any) -> str:
        return text_of(self.tokens(ids(prompt), number, **options))

    def texts(self, prompts: Iterable[str], number: int) -> list[str]:
        return [self.text(prompt, number) for prompt in prompts]

    def logprobs_TV(self, tokens: list[int]) -> Tensor:
        with torch.no_grad():
            return torch.log_softmax(self.model(torch.tensor([tokens])).logits[0].float(), -1)
