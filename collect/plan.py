"""Plans a recording: what is recorded and where to, its units, their names and their bytes.

The plan is the same for the command and its workers.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerBase

from collect.config import DataConfig
from collect.errors import PromptError
from collect.prompts import Prompt, digest_of, load_prompts
from collect.traces.layout import TraceSignal, row_bytes
from collect.traces.manifest import (
    TraceManifest,
    TraceModel,
    TracePlan,
    has_manifest,
    hash_value,
    open_writable_storage,
    read_manifest,
)
from collect.traces.reader import Trace
from collect.traces.writer import TraceWriter
from predictors.files import expand_home, path_exists
from predictors.spec import ModelSpec
from runtime.config import BUILTIN, DenseFormat, ModelConfig
from runtime.hf.decode_step import choose_kernels
from runtime.hf.loading import read_config
from runtime.hf.model_faults import check_tokens
from runtime.hf.tokens import load_tokenizer
from runtime.store.model_source import identity, resolve

log = logging.getLogger(__name__)

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
    tokens: tuple[int, ...]


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, settings: RecordingSettings
) -> list[EncodedPrompt]:
    """Tokenises prompts, cuts them at `max_prompt_tokens` and drops those without tokens.

    Prompts that are token ids already have been through the chat template; those that another one
    begins with are dropped too: a server records each turn of a conversation with all earlier ones,
    and parts of one text must not be on both sides of the split. So are texts that are equal to an
    earlier prompt after the cut.

    Raises:
        PromptError: `chat` is set and the model has no chat template.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    longest = settings.max_prompt_tokens
    if settings.chat and texts:
        of_texts = iter(_chats(texts, tokenizer, longest))
    else:
        of_texts = iter(tokenizer(texts)["input_ids"] if texts else [])
    cut = [
        list(next(of_texts) if isinstance(prompt, str) else prompt)[:longest] for prompt in prompts
    ]
    pairs = [(prompt, tokens) for prompt, tokens in zip(prompts, cut, strict=True) if tokens]
    begun = find_beginnings([tokens for _, tokens in pairs])
    first: dict[tuple[int, ...], int] = {}
    for number, (_, tokens) in enumerate(pairs):
        first.setdefault(tuple(tokens), number)
    kept = [
        (prompt, tokens)
        for number, (prompt, tokens) in enumerate(pairs)
        if first[tuple(tokens)] == number and (number not in begun or isinstance(prompt, str))
    ]
    if num_dropped := len(pairs) - len(kept):
        log.warning(
            "%d of %d prompts begin another one: left out. Those that differ only after %d tokens "
            "are kept if you raise data.max_prompt_tokens",
            num_dropped,
            len(pairs),
            longest,
        )
    return [
        EncodedPrompt(index, digest_of(prompt), tuple(tokens))
        for index, (prompt, tokens) in enumerate(kept)
    ]


def find_beginnings(prompts: Sequence[list[int]]) -> set[int]:
    """Returns the numbers of those that begin another one; of equal ones, of all but the first."""
    # In this order, each stands right before one that it begins, if there is any.
    order = sorted(range(len(prompts)), key=lambda number: (prompts[number], -number))
    return {
        number
        for number, longer in pairwise(order)
        if prompts[longer][: len(prompts[number])] == prompts[number]
    }


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


def max_rows(unit: Sequence[EncodedPrompt], settings: RecordingSettings) -> int:
    """Returns the rows of a unit if every request generates `new_tokens`."""
    return sum(len(prompt.tokens) + settings.new_tokens for prompt in unit)


def require_space(where: str | Path, needed_bytes: int) -> None:
    """Raises DiskFullError if the disk of the trace has too little free space."""
    open_writable_storage(where).require_space(
        needed_bytes + SPARE_BYTES,
        "the trace",
        advice="Record fewer prompts (data.num_prompts=...), fewer signals "
        "(signals=[gate_input,experts]), or to another disk (output=PATH)",
    )


@dataclass(frozen=True)
class RecordingJob:
    """Everything that decides a trace; a worker makes it from JSON and loads its own model."""

    model: ModelConfig
    data: DataConfig
    where: str
    """Folder or address of the trace."""
    signals: tuple[TraceSignal, ...]
    settings: RecordingSettings
    budget: str

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values for a worker. Paths are absolute: it may run in another folder.

        `decode_kernels=auto` is decided here. Each worker would measure for itself, and the bits of
        parts from different or busy machines would differ.
        """
        fields = {**asdict(self), "signals": list(self.signals), "where": absolute_path(self.where)}
        kernels = choose_kernels(self.model.decode_kernels, self._dtype())
        fields["model"] |= {"id": absolute_if_exists(self.model.id), "decode_kernels": kernels}
        if self.data.path is not None:
            fields["data"] |= {"path": absolute_if_exists(self.data.path)}
        return fields

    def _dtype(self) -> torch.dtype:
        """Returns the dtype that the model will have; float32 for a file that does not name one."""
        name = self.model.dtype
        if name == "auto":
            name = read_config(resolve(self.model)).get_text_config().dtype or "float32"
        return name if isinstance(name, torch.dtype) else getattr(torch, name)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "RecordingJob":
        return TypeAdapter(cls).validate_python(fields)

    def default_folder(self, signals: Sequence[TraceSignal]) -> Path:
        """Returns runs/traces/MODEL/DATA-DIGEST: other settings, or prompts at a path, another."""
        parts: list[Any] = [vars(self.model), vars(self.data), list(signals), vars(self.settings)]
        if self.data.path is not None:
            parts.append(self.prompts_digest)
        return Path("runs", "traces", self.model.name, f"{self.data.name}-{hash_value(parts)[:8]}")

    @cached_property
    def prompts(self) -> list[EncodedPrompt]:
        folder = resolve(self.model)
        tokenizer = load_tokenizer(folder)
        texts = load_prompts(self.data, seed=self.settings.seed)
        prompts = encode_prompts(texts, tokenizer, self.settings)
        check_tokens([token for prompt in prompts for token in prompt.tokens], read_config(folder))
        return prompts

    def plan(self, spec: ModelSpec) -> tuple[TracePlan, list[list[EncodedPrompt]]]:
        """Returns the plan, and the prompts of each unit.

        A unit is named by the digest of model, prompts, seed and settings.
        """
        work = split_units(self.prompts, self.settings, bytes_per_row=row_bytes(spec, self.signals))
        shared = {
            "version": RECORDING_VERSION,
            "model": spec.as_dict(),
            "signals": list(self.signals),
            "settings": self.trace_settings,
        }
        plan = TracePlan(
            source="recorded",
            model=TraceModel.from_spec(spec),
            signals=self.signals,
            dataset=self.data.name,
            prompts_digest=self.prompts_digest,
            settings=self.trace_settings,
            units=tuple(
                hash_value({**shared, "prompts": [[p.index, p.digest, p.tokens] for p in unit]})
                for unit in work
            ),
        )
        return plan, work

    @property
    def trace_settings(self) -> dict[str, Any]:
        """The settings in the trace, with `dense_format` where the model's own layers are rounded.

        Other states go through them, and the routers choose otherwise.
        """
        dense = self.model.dense_format
        rounded = {} if dense is DenseFormat.OWN else {"dense_format": dense.value}
        return asdict(self.settings) | rounded

    @property
    def prompts_digest(self) -> str:
        return hash_value([prompt.digest for prompt in self.prompts])

    def open_finished(self) -> Trace | None:
        """Returns the trace if it is complete and of this very model, which is not loaded."""
        assert self.prompts, "a source without texts is an error already"
        if not has_manifest(self.where):
            return None
        manifest = read_manifest(self.where)
        spec = manifest.plan.spec
        if not manifest.complete or not self.is_of_model(spec):
            return None
        writer = TraceWriter(self.where, self.plan(spec)[0])
        return None if writer.missing() else writer.finish()

    def is_of_model(self, spec: ModelSpec) -> bool:
        """Returns whether a trace with this spec was made from the job's model."""
        wanted = identity(resolve(self.model), self.model)
        is_same = all(getattr(spec, name) == value for name, value in wanted.items())
        return is_same and self.model.dtype in ("auto", spec.dtype)

    def is_in(self, manifest: TraceManifest) -> bool:
        """Returns whether a trace is finished and has the rows and the signals of the job."""
        plan = manifest.plan
        return (
            manifest.complete
            and plan.source == "recorded"
            and set(self.signals) <= set(plan.signals)
            and without_packing(plan.settings) == without_packing(self.trace_settings)
            and self.is_of_model(plan.spec)
            and plan.prompts_digest == self.prompts_digest
        )


def without_packing(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that decide the rows of a trace.

    Those that divide the work change at most the last bits of the states.
    """
    return {name: settings[name] for name in settings if name not in ("batch_size", "shard_bytes")}


def recording_settings(data: DataConfig, **options: Any) -> RecordingSettings:
    """Returns settings with the lengths of the data; `options` are the other fields."""
    return RecordingSettings(
        new_tokens=data.max_new_tokens,
        max_prompt_tokens=data.max_prompt_tokens,
        chat=data.chat,
        **options,
    )


def absolute_path(where: str) -> str:
    """Returns the folder's absolute path, or an address as it is."""
    return where if "://" in where else str(expand_home(where).resolve())


def absolute_if_exists(name: str) -> str:
    """Returns an absolute path for what exists here, and any other name (of the Hub) as it is."""
    is_path = name != BUILTIN and path_exists(expand_home(name))
    return absolute_path(name) if is_path else name
