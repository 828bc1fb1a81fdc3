"""Answers in the shapes of OpenAI's API: plain dictionaries, ready for JSON."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.generation.detokenizer import Detokenizer
from runtime.serving.choice import Piece, Reason
from runtime.serving.sampling import TokenLogprob
from runtime.serving.vocabulary import Vocabulary

IMPOSSIBLE = -9999.0
"""Stands for what JSON has not: minus infinity (OpenAI's API reference), and no number at all."""


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """What every part of one answer says again."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


def usage(num_prompt: int, num_completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


# ---- /v1/completions


def completion_choice(
    index: int, text: str, *, logprobs: dict[str, Any] | None, reason: Reason | None
) -> dict[str, Any]:
    """One answer, or a part of it, whose `reason` is None until the last."""
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None if reason is None else str(reason),
    }


def completion_logprobs(
    told: Sequence[tuple[TokenLogprob, int]], vocabulary: Vocabulary
) -> dict[str, Any]:
    """Lists over tokens, each token with its offset in the text."""
    entries = [entry for entry, _ in told]
    return {
        "tokens": [vocabulary.text(entry.token) for entry in entries],
        "token_logprobs": [logprob_of(entry.logprob) for entry in entries],
        "top_logprobs": [top_of(entry, vocabulary) for entry in entries],
        "text_offset": [offset for _, offset in told],
    }


def top_of(entry: TokenLogprob, vocabulary: Vocabulary) -> dict[str, float] | None:
    """By text, the token itself among them; of tokens that are written alike, the most likely.

    None where nothing foretells.
    """
    if entry.logprob is None:
        return None
    found: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
        found.setdefault(vocabulary.text(token), finite(logprob))
    return found


def prompt_offsets(
    entries: Sequence[TokenLogprob], detokeniser: Detokenizer
) -> list[tuple[TokenLogprob, int]]:
    """A prompt's tokens with the places in its text at which they begin."""
    found = []
    for entry in entries:
        found.append((entry, detokeniser.num_characters))
        detokeniser.push(entry.token)
    return found


def piece_offsets(pieces: Sequence[Piece], start: int) -> list[tuple[TokenLogprob, int]]:
    """An answer's tokens with their places in a text in which the answer begins at `start`."""
    return [(piece.logprob, start + piece.offset) for piece in pieces if piece.logprob is not None]


# ---- /v1/chat/completions


def chat_choice(
    index: int, text: str, *, logprobs: dict[str, Any] | None, reason: Reason
) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": str(reason),
    }


def chat_chunk(
    index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None, reason: Reason | None
) -> dict[str, Any]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": None if reason is None else str(reason),
    }


def chat_logprobs(pieces: Sequence[Piece], vocabulary: Vocabulary) -> dict[str, Any]:
    """A list of objects, one for each token."""
    content = []
    for piece in pieces:
        if piece.logprob is None:
            continue
        entry = piece.logprob
        top = [named(token, logprob, vocabulary) for token, logprob in entry.top]
        content.append({**named(entry.token, entry.logprob, vocabulary), "top_logprobs": top})
    return {"content": content, "refusal": None}


def named(token: int, logprob: float | None, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "token": vocabulary.text(token),
        "logprob": logprob_of(logprob),
        "bytes": vocabulary.bytes(token),
    }


def logprob_of(logprob: float | None) -> float | None:
    return None if logprob is None else finite(logprob)


def finite(logprob: float) -> float:
    return logprob if logprob > IMPOSSIBLE else IMPOSSIBLE
