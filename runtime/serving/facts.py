"""What requests are checked and written with: facts of the served model, and its tokenizer."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from runtime.generation.chat_template import (
    EndOfTurn,
    end_of_turn,
    has_template,
    render,
    special_ids,
)
from runtime.hf.tokens import context_length, eos_token_ids
from runtime.serving.caches import CacheBudget

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model's generation_config.json may recommend, taken where a request says nothing."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    name: str
    """What clients call the model."""
    aliases: frozenset[str]
    """What it is understood by, too."""
    tokenizer: PreTrainedTokenizerBase
    """Ready for several threads: see `shareable`."""
    vocab_size: int
    """Of the model: the tokenizer may know fewer."""
    context: int | None
    """Tokens of prompt and answer together, at most, as the model was made; None: unlimited."""
    logit_bytes: int
    """Of one position's logits, as the model makes them."""
    end_ids: frozenset[int]
    """What ends the model's text."""
    end_of_turn: EndOfTurn
    """What ends an answer in a chat, beside these."""
    special: dict[str, int] = field(default_factory=dict)
    """Special tokens by their text."""
    recommended: dict[str, float] = field(default_factory=dict)
    has_template: bool = True
    caches: CacheBudget | None = None
    """What bounds the caches of answers that are generated together; None: only their number."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""

    @property
    def longest(self) -> int | None:
        """Tokens of prompt and answer together, at most, as they are served here."""
        bounds = [self.context, None if self.caches is None else self.caches.longest]
        return min((bound for bound in bounds if bound is not None), default=None)

    def knows(self, name: str | None) -> bool:
        """Whether a request's `model` is this one; none means whatever is served."""
        return name is None or name == self.name or name in self.aliases


def facts_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    aliases: frozenset[str],
    chat_template: Path | None = None,
    caches: CacheBudget | None = None,
) -> Facts:
    """Reads them off the loaded model; the chat template's file, if there is one, is put in.

    Raises:
        OSError: the file can not be read.
        ChatError: what it holds is no template.
    """
    if chat_template is not None:
        tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        render([{"role": "user", "content": "?"}], tokenizer)  # every template knows a user
    text_config = model.config.get_text_config()
    return Facts(
        name=name,
        aliases=aliases,
        tokenizer=shareable(tokenizer),
        vocab_size=text_config.vocab_size,
        context=context_length(model.config),
        logit_bytes=text_config.vocab_size * model.dtype.itemsize,
        end_ids=frozenset(eos_token_ids(model)),
        end_of_turn=end_of_turn(tokenizer),
        special={str(tokenizer.convert_ids_to_tokens(i)): i for i in special_ids(tokenizer)},
        recommended=recommended(model.generation_config),
        has_template=has_template(tokenizer),
        caches=caches,
    )


def shareable(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same tokenizer, which several threads may use from now on, for encoding and decoding.

    Its first call takes back padding and truncation that its file may ask for; changing that while
    another thread uses it fails ("Already borrowed"). Later calls find nothing to change.
    """
    tokenizer("ready")
    return tokenizer


def recommended(generation_config: Any) -> dict[str, float]:
    """Sampling as the model's makers recommend it."""
    found = {name: getattr(generation_config, name, None) for name in SAMPLING}
    return {name: value for name, value in found.items() if value is not None}
