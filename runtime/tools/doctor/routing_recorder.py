"""Record the model's own routing in memory, for replays in the same process.

Shape suffixes: T tokens of the step, D hidden size, E experts, K top_k.
"""

import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from predictors.base import Floats, Ints, Signal
from runtime.hf.probes import Probes
from runtime.sim.step import ArrayStep

SIGNALS = {Signal.LAYER_INPUT, Signal.GATE_INPUT, Signal.ROUTED, Signal.LOGITS}
NEW_TOKENS = 48
"""New tokens after each prompt; ProMoE's figures are of sequences of about this length."""


class RoutingRecorder:
    """Keeps all signals of every step."""

    def __init__(self) -> None:
        self.steps: list[ArrayStep] = []
        self._experts: dict[int, Ints] = {}
        self._states: dict[tuple[Signal, int], Floats] = {}
        """Of the last step."""

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        self._experts, self._states = {}, {}
        step = ArrayStep(tokens_T.copy(), requests_T.copy(), self._experts, self._states)
        self.steps.append(step)

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        self._states[Signal.LAYER_INPUT, layer] = hidden_TD.copy()

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        self._states[Signal.GATE_INPUT, layer] = hidden_TD.copy()

    def routed(
        self, layer: int, experts_TK: Ints, logits_TE: Floats | None, weights_TK: Floats | None
    ) -> None:
        del weights_TK  # Replays use the experts and not their weights.
        self._experts[layer] = experts_TK.copy()
        if logits_TE is not None:
            self._states[Signal.LOGITS, layer] = logits_TE.copy()

    def end_step(self) -> None:
        """Do nothing: the step is complete."""


def record_routing(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, seconds: float
) -> list[ArrayStep]:
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
