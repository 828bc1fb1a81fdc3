"""Estimates how long a recording takes, from a short measurement before it begins."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from collect.plan import EncodedPrompt, RecordingSettings, make_batches, max_rows
from collect.recording import UnitRecorder, generate

MEASURED_PROMPT_TOKENS = 8
"""Tokens of each prompt that the measurement runs."""
MEASURED_DECODE_STEPS = 2
LEAST_WORK = 20
"""A recording of fewer times the measured tokens is over before an estimate helps."""


@dataclass(frozen=True)
class UnitCosts:
    """Sizes of a recording's units, in their order."""

    prompts: list[int]
    rows: list[int]
    """Rows if every request generates all its tokens."""
    seconds: list[float] | None
    """Estimated time on one worker; None for a recording too small to measure."""


@dataclass(frozen=True)
class RecordingSpeed:
    """Times of a model's forward passes."""

    prefill_token_seconds: float
    decode_step_seconds: float
    """One step of a whole batch."""

    def unit_seconds(self, unit: Sequence[EncodedPrompt], settings: RecordingSettings) -> float:
        """Returns the time of a unit; prompts of a batch are padded to the longest."""
        batches = list(make_batches(unit, settings.batch_size))
        padded = sum(len(batch) * len(batch[-1].tokens) for batch in batches)
        steps = len(batches) * settings.new_tokens
        return padded * self.prefill_token_seconds + steps * self.decode_step_seconds


def measure_costs(recorder: UnitRecorder) -> UnitCosts:
    """Returns sizes and estimated times of all units; runs a few forward passes."""
    settings = recorder.settings
    rows = [max_rows(unit, settings) for unit in recorder.work]
    batch = [
        replace(prompt, tokens=prompt.tokens[:MEASURED_PROMPT_TOKENS])
        for prompt in next(make_batches(recorder.work[0], settings.batch_size))
    ]
    measured = len(batch) * (MEASURED_PROMPT_TOKENS + MEASURED_DECODE_STEPS)
    seconds = None
    if sum(rows) >= LEAST_WORK * measured:
        speed = measure_speed(recorder.model, batch, settings)
        seconds = [speed.unit_seconds(unit, settings) for unit in recorder.work]
    return UnitCosts([len(unit) for unit in recorder.work], rows, seconds)


def measure_speed(
    model: PreTrainedModel, batch: Sequence[EncodedPrompt], settings: RecordingSettings
) -> RecordingSpeed:
    """Times the prefill of a batch and its decode steps; nothing is recorded."""

    def run(decode_steps: int) -> float:
        started = time.perf_counter()
        with torch.random.fork_rng():
            generate(model, batch, replace(settings, new_tokens=decode_steps), lambda *_: None)
        return time.perf_counter() - started

    # The first pass reads experts that are in memory afterwards.
    run(0)
    prefill = run(0)
    decode = max(0.0, run(MEASURED_DECODE_STEPS) - prefill) / MEASURED_DECODE_STEPS
    padded = len(batch) * max(len(prompt.tokens) for prompt in batch)
    return RecordingSpeed(prefill / padded, decode)
