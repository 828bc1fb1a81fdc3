"""Parse prompts from JSON lines or Python values into token ids, and batch similar lengths."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictStr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from predictors.errors import MoecastError
from predictors.files import require_plain_file
from predictors.records import Whole, is_absent
from runtime.errors import PromptFileError
from runtime.generation.chat_template import render
from runtime.generation.messages import check_encodable, content_text, describe_skipped
from runtime.hf.model_faults import check_length, check_tokens
from runtime.hf.tokens import context_length, load_tokenizer
from runtime.store.model_check import has_tokenizer

log = logging.getLogger(__name__)

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


Text = Annotated[StrictStr, AfterValidator(check_encodable)]


def read_content(content: Any, info: ValidationInfo) -> str:
    """Return a content's text; the context of the validation counts parts that are none."""
    skipped: Any = info.context
    text = content_text(content, skipped)
    if not text and not isinstance(content, str):
        raise PromptFileError("it has no text")
    return text


class PromptLine(BaseModel):
    """An object without unknown keys, in which null is absence."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: value for name, value in given.items() if not is_absent(value)}


class PromptMessage(PromptLine):
    role: Text
    content: Annotated[Text, BeforeValidator(read_content)]


class PromptEntry(PromptLine):
    """A line of the input, or a mapping."""

    id: Text | Whole | None = None
    prompt: Text | None = None
    messages: list[PromptMessage] | None = None
    tokens: list[Annotated[Whole, Field(ge=0)]] | None = None
    max_new_tokens: Annotated[Whole, Field(ge=1)] | None = None


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts for one model, whose limits it knows, and decodes answers."""

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    """None: prompts are token ids, and answers have no text."""

    def encode(self, given: PromptEntry) -> list[int]:
        """Token ids of an entry that has one kind of prompt.

        Raises:
            MoecastError: the model does not have such tokens, no tokenizer, or a chat template that
                refuses the messages.
        """
        if given.tokens is not None:
            vocabulary = self.config.get_text_config().vocab_size
            if max(given.tokens, default=0) >= vocabulary:
                raise PromptFileError(f"tokens must be ids from 0 to {vocabulary - 1}")
            return given.tokens
        if self.tokenizer is None:
            raise PromptFileError("this model has no tokenizer; give token ids as `tokens`")
        if given.messages is not None:
            tokens = render([message.model_dump() for message in given.messages], self.tokenizer)
        else:
            tokens = list(self.tokenizer(given.prompt)["input_ids"])
        check_tokens(tokens, self.config)
        return tokens

    def decode(self, tokens: list[int]) -> str | None:
        """The text of new tokens."""
        if self.tokenizer is None:
            return None
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def read_prompts(
    path: Path, encoder: PromptEncoder, *, max_new_tokens: int
) -> tuple[list[BatchPrompt], str]:
    """Read the file's prompts in order; also returns its sha256.

    The id of a line without `id` is its number, from 1; blank lines are skipped.

    Raises:
        PromptFileError: the file does not exist, or a line is not a valid prompt.
    """
    try:
        raw = require_plain_file(path, PromptFileError).read_bytes()
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
    if isinstance(prompts, (str, Mapping)):
        raise PromptFileError("prompts: give a list, of one prompt too")
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
    skipped: Counter[str] = Counter()
    for where, number, entry in entries:
        try:
            prompt = _parse_entry(number, entry, encoder, max_new_tokens, skipped)
        except ValidationError as error:
            raise PromptFileError(f"{where}: {_describe(error)}") from error
        except MoecastError as error:
            raise PromptFileError(f"{where}: {error}") from error
        if prompt.id in seen:
            raise PromptFileError(
                f"{where}: id {prompt.id!r} is already used by {seen[prompt.id]}; make ids unique"
            )
        seen[prompt.id] = where
        prompts.append(prompt)
    if skipped:
        log.warning(describe_skipped(skipped))
    return prompts


def _parse_entry(
    number: int, entry: Any, encoder: PromptEncoder, max_new_tokens: int, skipped: Counter[str]
) -> BatchPrompt:
    if not isinstance(entry, Mapping):
        raise PromptFileError(f"a {type(entry).__name__} is not a prompt; write a JSON object")
    given = PromptEntry.model_validate(entry, context=skipped)
    kinds = [kind for kind in KINDS if getattr(given, kind) is not None]
    if len(kinds) != 1:
        raise PromptFileError(
            f"has {' and '.join(kinds) or 'none'} of {', '.join(KINDS)}; give exactly one"
        )
    tokens = encoder.encode(given)
    if not tokens:
        raise PromptFileError(f"{kinds[0]} has no tokens to continue")
    limit = given.max_new_tokens or max_new_tokens
    check_length(len(tokens), limit, context_length(encoder.config))
    return BatchPrompt(number if given.id is None else given.id, tuple(tokens), limit)


def _describe(error: ValidationError) -> str:
    """The first fault of an entry, in a line."""
    faults = error.errors()
    name, *place = faults[0]["loc"]
    if faults[0]["type"] == "extra_forbidden" and not place:
        return f"unknown key {name!r}; known are {', '.join(PromptEntry.model_fields)}"
    where = ".".join(str(part) for part in (name, *(place if name != "id" else ())))
    # An id may be of two types, and there is a fault for each.
    texts = [
        fault["msg"].removeprefix("Value error, ").replace("Input", "it")
        for fault in faults
        if fault["loc"][0] == name
    ]
    return f"{where}: {' or '.join(texts if name == 'id' else texts[:1])}"


def find_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """Load the folder's tokenizer; None without one."""
    return load_tokenizer(folder) if has_tokenizer(folder) else None


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
