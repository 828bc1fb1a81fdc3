"""Plans a recording: its units, their names and their bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from collect.config import DataConfig
from collect.errors import DiskSpaceError, PromptError
from collect.prompts import PromptText
from collect.traces.layout import TraceSignal
from collect.traces.manifest import TraceModel, TracePlan, hash_value, open_writable_storage
from predictors.spec import ModelSpec

RECORDING_VERSION = 1
"""Part of every unit's name: increased when the same settings give other rows."""

SPARE_BYTES = 16 << 20
"""Allowance for arrow's headers, the lists of requests and `trace.json`."""


@dataclass(frozen=True, kw_only=True)
class RecordingSettings:
    """Settings of a recording; each of them changes the content of the trace."""

    new_tokens: int
    max_prompt_tokens: int
    chat: bool
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 64
    """Prompts in a batch share its padding, which affects the last bits of their states."""
    shard_bytes: int = 256 << 20


@dataclass(frozen=True)
class EncodedPrompt:
    """A request before it runs."""

    index: int
    """Number of the request in the trace."""
    digest: str
    dataset: str
    tokens: tuple[int, ...]


def encode_prompts(
    prompts: Sequence[PromptText], tokenizer: PreTrainedTokenizerBase, settings: RecordingSettings
) -> list[EncodedPrompt]:
    """Tokenises prompts, cuts them at `max_prompt_tokens` and drops those without tokens.

    Prompts that are token ids already have been through the chat template.

    Raises:
        PromptError: `chat` is set and the model has no chat template.
    """
    texts = [prompt.text for prompt in prompts if isinstance(prompt.text, str)]
    longest = settings.max_prompt_tokens
    if settings.chat and texts:
        of_texts = iter(_chats(texts, tokenizer, longest))
    else:
        of_texts = iter(tokenizer(texts)["input_ids"] if texts else [])
    cut = [
        list(next(of_texts) if isinstance(prompt.text, str) else prompt.text)[:longest]
        for prompt in prompts
    ]
    kept = [(prompt, tokens) for prompt, tokens in zip(prompts, cut, strict=True) if tokens]
    return [
        EncodedPrompt(index, prompt.digest, prompt.dataset, tuple(tokens))
        for index, (prompt, tokens) in enumerate(kept)
    ]


def _chats(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, longest: int
) -> list[list[int]]:
    """Wraps each text as a user's turn.

    A long text is cut inside the turn, so that the end of the turn and the assistant's prefix stay.
    """
    if tokenizer.chat_template is None:
        raise PromptError("this model has no chat template: set data.chat=false")

    def chat(text: str) -> list[int]:
        turn = [{"role": "user", "content": text}]
        written = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        # The template includes the special tokens.
        return tokenizer(written, add_special_tokens=False)["input_ids"]

    room = longest - len(chat(""))
    if room < 1:
        raise PromptError(
            f"data.max_prompt_tokens={longest}: the chat template alone takes {longest - room} "
            "tokens; increase it, or set data.chat=false"
        )
    inside = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [
        chat(text if len(tokens) <= room else tokenizer.decode(tokens[:room]))[:longest]
        for text, tokens in zip(texts, inside, strict=True)
    ]


def split_units(
    prompts: Sequence[EncodedPrompt], settings: RecordingSettings, *, bytes_per_row: int
) -> list[list[EncodedPrompt]]:
    """Splits prompts into units of at most `shard_bytes` and at least one prompt."""
    rows_allowed = max(1, settings.shard_bytes // bytes_per_row)
    units: list[list[EncodedPrompt]] = []
    rows = rows_allowed
    for prompt in prompts:
        num_rows = len(prompt.tokens) + settings.new_tokens
        if rows + num_rows > rows_allowed:
            units.append([])
            rows = 0
        units[-1].append(prompt)
        rows += num_rows
    return units


def make_batches(unit: Sequence[EncodedPrompt], batch_size: int) -> Iterator[list[EncodedPrompt]]:
    """Yields batches of prompts of similar length, so that they need little padding."""
    by_length = sorted(unit, key=lambda prompt: len(prompt.tokens))
    for start in range(0, len(by_length), batch_size):
        yield by_length[start : start + batch_size]


def make_plan(
    spec: ModelSpec,
    *,
    signals: Sequence[TraceSignal],
    data: DataConfig,
    settings: RecordingSettings,
    work: Sequence[Sequence[EncodedPrompt]],
) -> TracePlan:
    """Returns the plan; a unit is named by the digest of model, prompts, seed and settings."""
    shared = {
        "version": RECORDING_VERSION,
        "model": spec.as_dict(),
        "signals": list(signals),
        "settings": asdict(settings),
    }
    return TracePlan(
        source="recorded",
        model=TraceModel.from_spec(spec),
        signals=tuple(signals),
        dataset=data.name,
        prompts_digest=hash_value([prompt.digest for unit in work for prompt in unit]),
        settings=asdict(settings),
        units=tuple(
            hash_value({**shared, "prompts": [[p.index, p.digest, p.tokens] for p in unit]})
            for unit in work
        ),
    )


def max_rows(unit: Sequence[EncodedPrompt], settings: RecordingSettings) -> int:
    """Returns the rows of a unit if every request generates `new_tokens`."""
    return sum(len(prompt.tokens) + settings.new_tokens for prompt in unit)


def require_space(where: str | Path, needed_bytes: int) -> None:
    """Raises DiskSpaceError if the disk of the trace has too little free space."""
    needed = needed_bytes + SPARE_BYTES
    storage = open_writable_storage(where)
    free = storage.free_bytes()
    if free is not None and free < needed:
        raise DiskSpaceError(
            f"{storage.address}: the trace needs up to {needed:,} bytes, {free:,} are free. Record "
            "fewer prompts (data.num_prompts=...), fewer signals (signals=[gate_input,experts]), "
            "or another disk (output=PATH)"
        )
