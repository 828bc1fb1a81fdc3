"""Record the model's own routing in memory, for replays in the same process.

Shape suffixes: T tokens of the step, D hidden size, E experts, K top_k.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from predictors.base import Floats, Ints, Signal
from runtime.hf.probes import Probes

SIGNALS = {Signal.LAYER_INPUT, Signal.GATE_INPUT, Signal.ROUTED, Signal.LOGITS}
NEW_TOKENS = 48
"""New tokens after each prompt; ProMoE's figures are of sequences of about this length."""


@dataclass
class CapturedStep:
    """One forward pass, as `runtime.sim.replay` takes it."""

    tokens_T: Ints
    requests_T: Ints
    layer_inputs: dict[int, Floats] = field(default_factory=dict)
    gate_inputs: dict[int, Floats] = field(default_factory=dict)
    choices: dict[int, Ints] = field(default_factory=dict)
    scores: dict[int, Floats | None] = field(default_factory=dict)

    def layer_input(self, layer: int) -> Floats:
        return self.layer_inputs[layer]

    def gate_input(self, layer: int) -> Floats:
        return self.gate_inputs[layer]

    def logits(self, layer: int) -> Floats:
        logits = self.scores[layer]
        assert logits is not None, layer
        return logits

    def experts(self, layer: int) -> Ints:
        return self.choices[layer]


class RoutingRecorder:
    """Keeps all signals of every step."""

    def __init__(self) -> None:
        self.steps: list[CapturedStep] = []

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        self.steps.append(CapturedStep(tokens_T.copy(), requests_T.copy()))

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        self.steps[-1].layer_inputs[layer] = hidden_TD.copy()

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        self.steps[-1].gate_inputs[layer] = hidden_TD.copy()

    def routed(
        self, layer: int, experts_TK: Ints, logits_TE: Floats | None, weights_TK: Floats | None
    ) -> None:
        del weights_TK  # Replays use the experts and not their weights.
        self.steps[-1].choices[layer] = experts_TK.copy()
        self.steps[-1].scores[layer] = None if logits_TE is None else logits_TE.copy()

    def end_step(self) -> None:
        """Do nothing: the step is complete."""


def record_routing(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, seconds: float
) -> list[CapturedStep]:
    """Record greedy generation until the time is up, but at least the first prompt's prefill."""
    recorder = RoutingRecorder()
    started = time.monotonic()
    with torch.no_grad(), Probes(model, SIGNALS, recorder):
        for number, prompt in enumerate(prompts):
            left = seconds * (number + 1) / len(prompts) - (time.monotonic() - started)
            if number and left <= 0:
                break
            inputs = torch.tensor([list(prompt)])
            model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                max_time=max(left, 0.0),
            )
    return recorder.steps
