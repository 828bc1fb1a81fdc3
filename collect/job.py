"""Records work units: prompts go through the model, probes fill the unit's columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from collect.errors import TraceError
from collect.plan import EncodedPrompt, Settings, batches
from collect.progress import Advance
from collect.recorder import PROBES, Recorder
from collect.traces.manifest import Request, TracePlan, digest_of
from collect.traces.split import split_of
from runtime.hf.probes import Probes
from runtime.hf.tokens import context_length, eos_token_ids, pad_batch


@dataclass(frozen=True)
class Job:
    """Everything that recording needs, once the model is there."""

    model: PreTrainedModel
    plan: TracePlan
    work: Sequence[Sequence[EncodedPrompt]]
    settings: Settings

    def check_model(self) -> None:
        """TraceError when the model has an encoder, or prompt and generated tokens can exceed its
        context.
        """
        if self.model.config.is_encoder_decoder:
            raise TraceError(
                f"{type(self.model).__name__} has an encoder: its tokens go through the encoder's "
                "layers or the decoder's, and a trace's through all; such models are served "
                "(python -m runtime), not recorded"
            )
        context = context_length(self.model.config)
        longest = max(len(prompt.tokens) for unit in self.work for prompt in unit)
        if context is not None and longest + self.settings.new_tokens > context:
            raise TraceError(
                f"prompts of {longest} tokens and data.new_tokens={self.settings.new_tokens} "
                f"exceed the model's context of {context}: lower data.max_prompt_tokens or "
                "data.new_tokens"
            )

    def record_unit(self, unit: int, advance: Advance) -> tuple[dict[str, Any], list[Request]]:
        """`(arrays, requests)` of a unit; the same whoever records it, and when."""
        recorder = Recorder(self.plan.signals, end_tokens=eos_token_ids(self.model))
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


def generate(
    model: PreTrainedModel,
    batch: Sequence[EncodedPrompt],
    settings: Settings,
    begin_batch: Callable[[list[int], Any], None],
) -> None:
    """Left-padded prefill, then token by token as the model goes on by itself.

    One token more than is recorded is chosen: the last one never enters the model.
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
