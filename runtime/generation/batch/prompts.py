"""Parse prompts from JSON lines or Python values into token ids, and batch similar lengths."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from predictors.errors import MoecastError
from runtime.errors import PromptFileError
from runtime.generation.chat_template import render
from runtime.hf.model_faults import check_tokens
from runtime.hf.tokens import context_length, load_tokenizer
from runtime.store.model_check import has_tokenizer
from zoo.digest import refuse_pipes

KEYS = ("id", "prompt", "messages", "tokens", "max_new_tokens")
KINDS = ("prompt", "messages", "tokens")
"""Each line has exactly one of these."""

PromptId = str | int


@dataclass(frozen=True)
class BatchPrompt:
    """Token ids to continue."""

    id: PromptId
    tokens: tuple[int, ...]
    max_new_tokens: int


Batch = tuple[BatchPrompt, ...]


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes text and messages for one model and knows its limits."""

    of_text: Callable[[str], list[int]]
    of_messages: Callable[[Sequence[Mapping[str, str]]], list[int]]
    vocabulary: int
    """Number of token ids."""
    context: int | None = None
    """Most tokens of prompt and answer together; None: the model names no limit."""


def read_prompts(
    path: Path, encoder: PromptEncoder, *, max_new_tokens: int
) -> tuple[list[BatchPrompt], str]:
    """Read the file's prompts in order; also returns its sha256.

    The id of a line without `id` is its number, from 1; blank lines are skipped.

    Raises:
        PromptFileError: the file does not exist, or a line is not a valid prompt.
    """
    try:
        raw = refuse_pipes(path).read_bytes()
    except OSError as error:
        raise PromptFileError(
            f"input={path}: {error.strerror}; give a file of JSON lines"
        ) from error
    entries = (
        (f"{path}, line {number}", number, _parse_line(path, number, line))
        for number, line in enumerate(raw.split(b"\n"), start=1)
        if line.strip()
    )
    prompts = _parse_entries(entries, encoder, max_new_tokens=max_new_tokens)
    if not prompts:
        raise PromptFileError(f"input={path}: contains no prompt; write one JSON object per line")
    return prompts, hashlib.sha256(raw).hexdigest()


def parse_prompts(
    prompts: Iterable[Any], encoder: PromptEncoder, *, max_new_tokens: int
) -> list[BatchPrompt]:
    """Parse texts, lists of token ids, lists of messages, or mappings as in a file.

    The id of a prompt without `id` is its index.

    Raises:
        PromptFileError: a prompt is none of these.
    """
    entries = (
        (f"prompts[{place}]", place, _as_entry(prompt)) for place, prompt in enumerate(prompts)
    )
    return _parse_entries(entries, encoder, max_new_tokens=max_new_tokens)


def _as_entry(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        return {"messages": prompt}
    if isinstance(prompt, Sequence):
        return {"tokens": prompt}
    return prompt


def _parse_line(path: Path, number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    # UnicodeDecodeError and JSONDecodeError are ValueErrors.
    except (ValueError, RecursionError) as error:
        raise PromptFileError(
            f"{path}, line {number}: not JSON ({error}); write one object per line, such as "
            '{"prompt": "Once upon a time"}'
        ) from error


def _parse_entries(
    entries: Iterable[tuple[str, int, Any]], encoder: PromptEncoder, *, max_new_tokens: int
) -> list[BatchPrompt]:
    prompts: list[BatchPrompt] = []
    seen: dict[PromptId, str] = {}
    for where, number, entry in entries:
        prompt = _parse_entry(where, number, entry, encoder, max_new_tokens)
        if prompt.id in seen:
            raise PromptFileError(
                f"{where}: id {prompt.id!r} is already used by {seen[prompt.id]}; make ids unique"
            )
        seen[prompt.id] = where
        prompts.append(prompt)
    return prompts


def _parse_entry(
    where: str, number: int, entry: Any, encoder: PromptEncoder, max_new_tokens: int
) -> BatchPrompt:
    if not isinstance(entry, Mapping):
        raise PromptFileError(
            f"{where}: a {type(entry).__name__} is not a prompt; write a JSON object"
        )
    unknown = [key for key in entry if key not in KEYS]
    if unknown:
        raise PromptFileError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(KEYS)}")
    kinds = [kind for kind in KINDS if entry.get(kind) is not None]
    if len(kinds) != 1:
        raise PromptFileError(
            f"{where}: has {' and '.join(kinds) or 'none'} of {', '.join(KINDS)}; give exactly one"
        )
    limit = entry.get("max_new_tokens", max_new_tokens)
    if not is_integer(limit) or limit < 1:
        raise PromptFileError(
            f"{where}: max_new_tokens is {limit!r}; it must be a positive integer"
        )
    own = entry.get("id", number)
    if not (isinstance(own, str) or is_integer(own)):
        raise PromptFileError(f"{where}: id is {own!r}; it must be a string or an integer")
    tokens = _parse_tokens(where, kinds[0], entry[kinds[0]], encoder)
    if encoder.context is not None and len(tokens) + limit > encoder.context:
        raise PromptFileError(
            f"{where}: {len(tokens)} prompt tokens and max_new_tokens={limit} exceed the model's "
            f"context of {encoder.context}; shorten the prompt or lower max_new_tokens"
        )
    return BatchPrompt(own, tuple(tokens), limit)


def is_integer(value: Any) -> bool:
    """True for an `int` that is not a `bool`."""
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_tokens(where: str, kind: str, value: Any, encoder: PromptEncoder) -> list[int]:
    if kind == "tokens":
        tokens = value
        whole = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        if not whole or not all(is_integer(t) and 0 <= t < encoder.vocabulary for t in tokens):
            raise PromptFileError(
                f"{where}: tokens must be a list of ids from 0 to {encoder.vocabulary - 1}"
            )
    elif kind == "prompt":
        _check_encodable(where, value)
        if not isinstance(value, str):
            raise PromptFileError(f"{where}: prompt must be a string, not a {type(value).__name__}")
        tokens = _encode(where, lambda: encoder.of_text(value))
    else:
        if not isinstance(value, Sequence) or not all(map(_is_message, value)):
            raise PromptFileError(
                f'{where}: messages must be a list of {{"role": ..., "content": ...}}, both strings'
            )
        for message in value:
            for part in message.values():
                _check_encodable(where, part)
        tokens = _encode(where, lambda: encoder.of_messages(value))
    if not tokens:
        raise PromptFileError(f"{where}: {kind} has no tokens to continue")
    return list(tokens)


def _check_encodable(where: str, text: Any) -> None:
    """Refuses half a surrogate pair, which JSON can spell, but which is no character."""
    try:
        str(text).encode()
    except UnicodeEncodeError as error:
        raise PromptFileError(
            f"{where}: the text has half a surrogate pair at character {error.start}; it is not "
            "valid Unicode"
        ) from error


def _is_message(value: Any) -> bool:
    is_mapping = isinstance(value, Mapping) and set(value) == {"role", "content"}
    return is_mapping and all(isinstance(part, str) for part in value.values())


def _encode(where: str, encode: Callable[[], list[int]]) -> list[int]:
    try:
        return encode()
    except MoecastError as error:
        raise PromptFileError(f"{where}: {error}") from error


def find_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """Load the folder's tokenizer.

    None without one: prompts are then token ids, and results have no text.
    """
    return load_tokenizer(folder) if has_tokenizer(folder) else None


def make_prompt_encoder(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> PromptEncoder:
    vocabulary, context = config.get_text_config().vocab_size, context_length(config)
    if tokenizer is None:
        return PromptEncoder(_refuse_text, _refuse_text, vocabulary, context)

    def of_text(text: str) -> list[int]:
        tokens = list(tokenizer(text)["input_ids"])
        check_tokens(tokens, config)
        return tokens

    def of_messages(messages: Sequence[Mapping[str, str]]) -> list[int]:
        tokens = render(messages, tokenizer)
        check_tokens(tokens, config)
        return tokens

    return PromptEncoder(of_text, of_messages, vocabulary, context)


def make_decoder(tokenizer: PreTrainedTokenizerBase | None) -> Callable[[list[int]], str] | None:
    """Make the function that decodes new tokens, or None without a tokenizer."""
    if tokenizer is None:
        return None
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))


def _refuse_text(_: object) -> NoReturn:
    raise PromptFileError("this model has no tokenizer; give token ids as `tokens`")


def make_batches(prompts: Sequence[BatchPrompt], batch_size: int) -> list[Batch]:
    """Make batches in the order in which they run.

    The longest come first: a batch that does not fit in memory fails at once, and the last group
    is short. The batches depend on the prompts and `batch_size` alone: padding may change a row's
    last bits, so a resumed run must compute the same batches.
    """
    order = sorted(prompts, key=lambda prompt: (-len(prompt.tokens), -prompt.max_new_tokens))
    return [tuple(order[at : at + batch_size]) for at in range(0, len(order), batch_size)]


def max_cache_length(batch: Batch) -> int:
    """Columns of the batch's KV cache when its last row ends."""
    return max(len(prompt.tokens) for prompt in batch) + max(
        prompt.max_new_tokens for prompt in batch
    )


def padding_share(batches: Sequence[Batch]) -> float:
    used = sum(len(prompt.tokens) for batch in batches for prompt in batch)
    computed = sum(len(batch) * max(len(prompt.tokens) for prompt in batch) for batch in batches)
    return 1 - used / computed if computed else 0.0
