"""A recording job: what is recorded and where to, the same for the command and its workers."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from transformers import GenerationConfig, PreTrainedModel

from collect.config import DataConfig
from collect.errors import TraceError
from collect.plan import (
    EncodedPrompt,
    RecordingSettings,
    encode_prompts,
    make_batches,
    make_plan,
    split_units,
)
from collect.prompts import load_prompts
from collect.recorder import PROBES, SignalRecorder
from collect.traces.layout import TraceSignal, choose_split, row_bytes
from collect.traces.manifest import TracePlan, TraceRequest, has_manifest, hash_value, read_manifest
from collect.traces.reader import Trace
from collect.traces.writer import TraceWriter
from predictors.files import expand_home, path_exists
from predictors.spec import ModelSpec
from runtime.config import BUILTIN, ModelConfig, SystemConfig
from runtime.hf.decode_step import choose_kernels
from runtime.hf.loading import read_config
from runtime.hf.model_faults import check_tokens
from runtime.hf.probes import Probes
from runtime.hf.tokens import context_length, eos_token_ids, load_tokenizer, pad_batch
from runtime.store.model_source import identity, resolve


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

    @cached_property
    def prompts(self) -> list[EncodedPrompt]:
        folder = resolve(self.model)
        tokenizer = load_tokenizer(folder)
        texts = load_prompts(self.data, seed=self.settings.seed)
        prompts = encode_prompts(texts, tokenizer, self.settings)
        check_tokens([token for prompt in prompts for token in prompt.tokens], read_config(folder))
        return prompts

    def plan(self, spec: ModelSpec) -> tuple[TracePlan, list[list[EncodedPrompt]]]:
        work = split_units(self.prompts, self.settings, bytes_per_row=row_bytes(spec, self.signals))
        plan = make_plan(
            spec, signals=self.signals, data=self.data, settings=self.settings, work=work
        )
        return plan, work

    def open_finished(self) -> Trace | None:
        """Returns the trace if it is complete, without loading the model."""
        assert self.prompts, "a source without texts is an error already"
        spec = self._recorded_spec()
        if spec is None or not read_manifest(self.where).complete:
            return None
        writer = TraceWriter(self.where, self.plan(spec)[0])
        return None if writer.missing() else writer.finish()

    def _recorded_spec(self) -> ModelSpec | None:
        """Spec of the trace at `where`, if that trace is of this very model."""
        if not has_manifest(self.where):
            return None
        spec = read_manifest(self.where).plan.spec
        return spec if self.is_of_model(spec) else None

    def is_of_model(self, spec: ModelSpec) -> bool:
        """Returns whether a trace with this spec was made from the job's model."""
        wanted = identity(resolve(self.model), self.model)
        is_same = all(getattr(spec, name) == value for name, value in wanted.items())
        return is_same and self.model.dtype in ("auto", spec.dtype)

    def load(self) -> "UnitRecorder":
        """Loads the model, which the caller closes.

        Raises:
            TraceError: this model cannot be recorded, or prompts exceed its context.
        """
        from runtime import load

        # Before the model: a missing source is reported at once.
        assert self.prompts, "a source without texts is an error already"
        # Recording needs no forecasts, and the predictors are not trained yet.
        model = load(self.model, budget=self.budget, system=SystemConfig())
        recorder = UnitRecorder(model, *self.plan(model.moecast.spec), self.settings)
        try:
            recorder.check_model()
        except TraceError:
            model.close()
            raise
        return recorder


@dataclass(frozen=True)
class UnitRecorder:
    """A loaded model that records units of a plan."""

    model: PreTrainedModel
    plan: TracePlan
    work: Sequence[Sequence[EncodedPrompt]]
    """Prompts of each unit."""
    settings: RecordingSettings

    def check_model(self) -> None:
        """Check that traces can be made of this model.

        Raises:
            TraceError: the model has an encoder, or prompt and generated tokens can exceed its
                context.
        """
        if self.model.config.is_encoder_decoder:
            raise TraceError(
                f"{type(self.model).__name__} has an encoder: a token goes through the layers of "
                "the encoder or of the decoder, and a trace has all layers for each token. Such "
                "models can be served (moecast serve), not recorded"
            )
        context = context_length(self.model.config)
        longest = max(len(prompt.tokens) for unit in self.work for prompt in unit)
        if context is not None and longest + self.settings.new_tokens > context:
            raise TraceError(
                f"prompts of {longest} tokens and data.max_new_tokens={self.settings.new_tokens} "
                f"exceed the model's context of {context}: lower data.max_prompt_tokens or "
                "data.max_new_tokens"
            )

    def record(
        self, unit: int, advance: Callable[[int], object] = lambda _: None
    ) -> tuple[dict[str, Any], list[TraceRequest]]:
        """Returns the arrays and requests of a unit, which depend on neither worker nor order.

        `advance` is called after each step of the model with the tokens that it recorded.
        """
        recorder = SignalRecorder(
            self.plan.signals, end_tokens=eos_token_ids(self.model), on_rows=advance
        )
        probes = {PROBES[signal] for signal in self.plan.signals}
        with Probes(self.model, probes, recorder, complete=True), torch.random.fork_rng():
            for number, batch in enumerate(make_batches(self.work[unit], self.settings.batch_size)):
                seed = hash_value([self.plan.units[unit], number])
                torch.manual_seed(int(seed[:15], 16))
                generate(self.model, batch, self.settings, recorder.begin_batch)
        arrays = recorder.take()
        rows = np.bincount(arrays["request"], minlength=self.work[unit][-1].index + 1)
        requests = [
            TraceRequest(
                index=prompt.index,
                digest=prompt.digest,
                dataset=prompt.dataset,
                split=choose_split(prompt.digest),
                prompt_tokens=len(prompt.tokens),
                generated_tokens=int(rows[prompt.index]) - len(prompt.tokens),
            )
            for prompt in self.work[unit]
        ]
        return arrays, requests


def generate(
    model: PreTrainedModel,
    batch: Sequence[EncodedPrompt],
    settings: RecordingSettings,
    begin_batch: Callable[[list[int], Any], None],
) -> None:
    """Generates from left-padded prompts, while the probes record.

    One token more than is recorded is sampled: the last one does not go through the model.
    """
    eos_ids = list(eos_token_ids(model))
    padding = eos_ids[0] if eos_ids else 0
    tokens_BS, mask_BS = pad_batch([prompt.tokens for prompt in batch], padding)
    begin_batch([prompt.index for prompt in batch], mask_BS.numpy())
    sampling: dict[str, Any] = {"do_sample": False}
    if settings.temperature > 0:
        sampling = {
            "do_sample": True,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": 0,
        }
    model.generate(
        tokens_BS.to(model.device),
        attention_mask=mask_BS.to(model.device),
        generation_config=GenerationConfig(
            max_new_tokens=settings.new_tokens + 1,
            eos_token_id=eos_ids or None,
            pad_token_id=padding,
            **sampling,
        ),
    )


def recording_settings(data: DataConfig, **options: Any) -> RecordingSettings:
    """Returns settings with the lengths of the data; `options` are the other fields."""
    return RecordingSettings(
        new_tokens=data.max_new_tokens,
        max_prompt_tokens=data.max_prompt_tokens,
        chat=data.chat,
        **options,
    )


def default_folder(
    model: ModelConfig,
    data: DataConfig,
    *,
    signals: Sequence[TraceSignal],
    settings: RecordingSettings,
) -> Path:
    """Returns runs/traces/MODEL/DATA-DIGEST: other settings, another folder."""
    parts = [vars(model), vars(data), list(signals), vars(settings)]
    return Path("runs", "traces", model.name, f"{data.name}-{hash_value(parts)[:8]}")


def absolute_path(where: str) -> str:
    """Returns the folder's absolute path, or an address as it is."""
    return where if "://" in where else str(expand_home(where).resolve())


def absolute_if_exists(name: str) -> str:
    """Returns an absolute path for what exists here, and any other name (of the Hub) as it is."""
    is_path = name != BUILTIN and path_exists(expand_home(name))
    return absolute_path(name) if is_path else name
