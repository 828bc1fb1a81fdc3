"""Runs prompts through a model and writes the trace of what its layers saw and chose."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from collect.config import DataConfig
from collect.errors import TraceError
from collect.plan import (
    EncodedPrompt,
    Settings,
    batches,
    encode,
    make_plan,
    most_rows,
    require_space,
    units,
)
from collect.progress import Advance, prompts_progress
from collect.prompts import load_prompts
from collect.recorder import PROBES, Recorder
from collect.traces.layout import ALL_SIGNALS, TraceSignal, row_bytes
from collect.traces.manifest import MANIFEST, Request, TracePlan, digest_of, read_manifest
from collect.traces.reader import Trace
from collect.traces.split import split_of
from collect.traces.writer import TraceWriter
from predictors.spec import ModelSpec
from runtime.config import ModelConfig
from runtime.models import identity, resolve
from runtime.probes import Probes


def settings_of(data: DataConfig, **options: Any) -> Settings:
    """Settings from the data's own lengths and `temperature`, `top_p`, `seed`, `batch_size`,
    `shard_bytes`."""
    return Settings(
        new_tokens=data.new_tokens,
        max_prompt_tokens=data.max_prompt_tokens,
        chat=data.chat,
        **options,
    )


def default_folder(
    model: ModelConfig, data: DataConfig, *, signals: Sequence[TraceSignal], settings: Settings
) -> Path:
    """runs/traces/MODEL/DATA-DIGEST: other settings, another folder."""
    asked = [vars(model), vars(data), list(signals), vars(settings)]
    return Path("runs", "traces", model.name, f"{data.name}-{digest_of(asked)[:8]}")


def collect(
    model_config: ModelConfig,
    data_config: DataConfig,
    *,
    folder: Path,
    signals: Sequence[TraceSignal] = ALL_SIGNALS,
    settings: Settings | None = None,
    budget: str = "100%",
    console: Console | None = None,
) -> Trace:
    """Makes, completes or just opens the trace in `folder`; idempotent.

    Where the trace is there already, no model is loaded.

    Args:
        signals: what to record.
        settings: lengths, sampling, seed; `settings_of(data_config)` unless given.
        budget: memory for experts while recording.
        console: where to say what is being done; None is silent.

    Raises:
        TraceError: the folder holds something else, or values do not fit in half precision.
        PromptError: no prompts to be had.
        DiskSpaceError: not enough room, said before anything is recorded.
        CheckpointError: no such model.
    """
    trace = collect_part(
        model_config,
        data_config,
        folder=folder,
        signals=signals,
        settings=settings,
        budget=budget,
        console=console,
    )
    assert trace is not None, "one worker does all the work"
    return trace


def collect_part(
    model_config: ModelConfig,
    data_config: DataConfig,
    *,
    folder: Path,
    signals: Sequence[TraceSignal] = ALL_SIGNALS,
    settings: Settings | None = None,
    budget: str = "100%",
    console: Console | None = None,
    worker: int = 0,
    num_workers: int = 1,
) -> Trace | None:
    """`collect` as one of several workers; None when others have units still to write."""
    settings = settings or settings_of(data_config)
    signals = tuple(signal for signal in ALL_SIGNALS if signal in signals)
    model_folder = resolve(model_config)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    prompts = encode(load_prompts(data_config, seed=settings.seed), tokenizer, settings)

    def planned(spec: ModelSpec) -> tuple[TracePlan, list[list[EncodedPrompt]]]:
        work = units(prompts, settings, bytes_per_row=row_bytes(spec, signals))
        plan = make_plan(spec, signals=signals, data=data_config, settings=settings, work=work)
        return plan, work

    spec = recorded_spec(folder, identity(model_folder, model_config), model_config.dtype)
    if spec is not None and read_manifest(folder).complete:
        writer = TraceWriter(folder, planned(spec)[0])
        if not writer.missing():
            return writer.finish()
    from runtime import load

    model = load(model_config, budget=budget)
    with model.moecast as handle:
        plan, work = planned(handle.spec)
        job = Job(model, plan, work, settings)
        job.check_model()
        return job.run(folder, console=console, worker=worker, num_workers=num_workers)


def recorded_spec(folder: Path, identity: dict[str, str], dtype: str) -> ModelSpec | None:
    """Spec of the trace in `folder`, when that trace is of this very model."""
    if not (folder / MANIFEST).exists():
        return None
    spec = read_manifest(folder).plan.spec
    same = all(getattr(spec, name) == value for name, value in identity.items())
    return spec if same and dtype in ("auto", spec.dtype) else None


@dataclass(frozen=True)
class Job:
    """Everything that recording needs, once the model is there."""

    model: PreTrainedModel
    plan: TracePlan
    work: Sequence[Sequence[EncodedPrompt]]
    settings: Settings

    def check_model(self) -> None:
        """TraceError when the model has an encoder, or prompt and generated tokens can exceed its
        context."""
        if self.model.config.is_encoder_decoder:
            raise TraceError(
                f"{type(self.model).__name__} has an encoder: its tokens go through the encoder's "
                "layers or the decoder's, and a trace's through all; such models are served "
                "(python -m runtime), not recorded"
            )
        text = self.model.config.get_text_config()
        context = getattr(text, "max_position_embeddings", None)
        longest = max(len(prompt.tokens) for unit in self.work for prompt in unit)
        if context is not None and longest + self.settings.new_tokens > context:
            raise TraceError(
                f"prompts of {longest} tokens and data.new_tokens={self.settings.new_tokens} "
                f"exceed the model's context of {context}: lower data.max_prompt_tokens or "
                "data.new_tokens"
            )

    def run(
        self, folder: Path, *, console: Console | None, worker: int, num_workers: int
    ) -> Trace | None:
        """Records this worker's missing units; the last worker to end finishes the trace."""
        bytes_per_row = row_bytes(self.plan.spec, self.plan.signals)

        def bytes_of(some: Sequence[int]) -> int:
            return bytes_per_row * sum(most_rows(self.work[i], self.settings) for i in some)

        if not (folder / MANIFEST).exists():
            require_space(folder, bytes_of(range(len(self.work))))
        writer = TraceWriter(folder, self.plan)
        missing = writer.missing()
        require_space(folder, bytes_of(missing))
        mine = [unit for unit in missing if unit % num_workers == worker]
        num_prompts = sum(len(self.work[unit]) for unit in mine)
        if console is not None:
            console.print(
                f"{folder}: {num_prompts} prompts to record in {len(mine)} of {len(self.work)} "
                f"parts, at most {bytes_of(mine):,} bytes ({bytes_per_row:,} a token)",
                highlight=False,
                soft_wrap=True,
            )
        with prompts_progress(console, total=num_prompts) as advance:
            for unit in mine:
                writer.write(unit, *self.record_unit(unit, advance))
        return None if writer.missing() else writer.finish()

    def record_unit(self, unit: int, advance: Advance) -> tuple[dict[str, Any], list[Request]]:
        """`(arrays, requests)` of a unit; the same whoever records it, and when."""
        recorder = Recorder(self.plan.signals, end_tokens=end_tokens(self.model))
        probes = {PROBES[signal] for signal in self.plan.signals}
        with Probes(self.model, probes, recorder, complete=True), torch.random.fork_rng():
            for number, batch in enumerate(batches(self.work[unit], self.settings.batch_size)):
                seed = digest_of([self.plan.units[unit], number])
                torch.manual_seed(int(seed[:15], 16))
                generate(self.model, batch, self.settings, recorder.begin_batch)
                advance(len(batch))
        arrays = recorder.take()
        rows = np.bincount(arrays["request"], minlength=self.work[unit][-1].index + 1)
        requests = [
            Request(
                index=prompt.index,
                digest=prompt.digest,
                dataset=prompt.dataset,
                split=split_of(prompt.digest),
                prompt_tokens=len(prompt.tokens),
                generated_tokens=int(rows[prompt.index]) - len(prompt.tokens),
            )
            for prompt in self.work[unit]
        ]
        return arrays, requests


def end_tokens(model: PreTrainedModel) -> list[int]:
    """Ids that end a text; none for a model that knows no end."""
    found = model.generation_config.eos_token_id if model.generation_config else None
    if found is None:
        return []
    return list(found) if isinstance(found, list | tuple) else [found]


def generate(
    model: PreTrainedModel,
    batch: Sequence[EncodedPrompt],
    settings: Settings,
    begin_batch: Callable[[list[int], Any], None],
) -> None:
    """Left-padded prefill, then token by token as the model goes on by itself.

    One token more than is recorded is chosen: the last one never enters the model.
    """
    longest = max(len(prompt.tokens) for prompt in batch)
    ends = end_tokens(model)
    padding = ends[0] if ends else 0
    tokens_BS = torch.full((len(batch), longest), padding, dtype=torch.int64)
    mask_BS = torch.zeros_like(tokens_BS)
    for row, prompt in enumerate(batch):
        tokens_BS[row, longest - len(prompt.tokens) :] = torch.tensor(prompt.tokens)
        mask_BS[row, longest - len(prompt.tokens) :] = 1
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
            eos_token_id=ends or None,
            pad_token_id=padding,
            **sampling,
        ),
    )
