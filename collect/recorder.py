"""Runs the prompts of a unit through a model and collects its signals from the probes.

Shape suffixes: B prompts of the batch, S padded prompt length, T tokens of the step (B x S, then
B), N rows kept of a step, D hidden size, E experts, K top_k.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from collect.errors import TraceError
from collect.plan import EncodedPrompt, RecordingJob, RecordingSettings, make_batches
from collect.traces.layout import PROBES, TOKEN_DTYPES, TraceSignal, choose_split, column_name
from collect.traces.manifest import TracePlan, TraceRequest, hash_value
from collect.traces.writer import to_half
from predictors.base import Floats, Ints
from predictors.metrics import Phase
from runtime.config import SystemConfig
from runtime.generation.sampling import drawing_options
from runtime.hf.loading import read_config
from runtime.hf.probes import Probes
from runtime.hf.tokens import context_length, eos_token_ids, pad_batch
from runtime.store.model_source import resolve


class SignalRecorder:
    """A `runtime.hf.probes.EventListener` that collects a unit, batch after batch.

    Rows of padding, and rows of a request from its end-of-text token on, are dropped.
    `on_rows` is called after each step with its number of rows.
    """

    def __init__(
        self,
        signals: Collection[TraceSignal],
        *,
        end_tokens: Collection[int],
        on_rows: Callable[[int], object] = lambda _: None,
    ):
        self._signals = frozenset(signals)
        self._end_tokens = np.array(sorted(end_tokens), dtype=np.int64)
        self._on_rows = on_rows
        self._pieces: dict[str, list[NDArray]] = defaultdict(list)
        self._requests_B = self._next_position_B = np.empty(0, np.int64)
        self._alive_B = np.empty(0, bool)
        self._mask_BS: NDArray | None = None
        """Of the prompts whose prefill is next."""
        self._num_tokens = 0
        self._kept_N: NDArray[np.int64] | None = None
        """Rows of the step that are kept; None keeps all."""

    def begin_batch(self, requests: Sequence[int], mask_BS: NDArray) -> None:
        """Announces the prompts whose prefill is next; `mask_BS` is False for padding."""
        self._requests_B = np.asarray(requests, dtype=np.int64)
        self._mask_BS = np.asarray(mask_BS, dtype=bool)
        self._alive_B = np.ones(len(requests), dtype=bool)
        self._next_position_B = self._mask_BS.sum(axis=1)

    def begin_step(self, tokens_T: Ints, _requests_T: Ints) -> None:
        if (tokens_T < 0).any():
            raise TraceError(
                "a trace contains token ids, which prompts given as embeddings do not have; "
                "pass input_ids to the model"
            )
        mask_BS, self._mask_BS = self._mask_BS, None
        if mask_BS is not None:
            assert tokens_T.size == mask_BS.size, "the prefill of a batch is one step"
            kept_T, phase = mask_BS.reshape(-1), Phase.PREFILL
            requests_T = np.repeat(self._requests_B, mask_BS.shape[1])
            positions_T = (np.cumsum(mask_BS, axis=1) - 1).reshape(-1)
        else:
            assert tokens_T.shape == self._alive_B.shape, "one token of each request in a step"
            self._alive_B &= ~np.isin(tokens_T, self._end_tokens)
            kept_T, phase = self._alive_B, Phase.DECODE
            requests_T, positions_T = self._requests_B, self._next_position_B
            self._next_position_B = positions_T + 1
        self._num_tokens = len(tokens_T)
        self._kept_N = None if kept_T.all() else np.flatnonzero(kept_T)
        values = {
            "request": requests_T,
            "position": positions_T,
            "token": tokens_T,
            "phase": np.full(len(tokens_T), phase),
        }
        for name, dtype in TOKEN_DTYPES.items():
            self._pieces[name].append(self._kept(values[name]).astype(dtype))

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        self._keep(TraceSignal.LAYER_INPUT, layer, hidden_TD)

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        self._keep(TraceSignal.GATE_INPUT, layer, hidden_TD)

    def routed(
        self, layer: int, experts_TK: Ints, logits_TE: Floats | None, weights_TK: Floats | None
    ) -> None:
        self._keep(TraceSignal.EXPERTS, layer, experts_TK)
        self._keep(TraceSignal.GATE_LOGITS, layer, logits_TE)
        self._keep(TraceSignal.WEIGHTS, layer, weights_TK)

    def end_step(self) -> None:
        self._on_rows(len(self._pieces["token"][-1]))

    def _keep(self, signal: TraceSignal, layer: int, values_T: NDArray | None) -> None:
        if signal not in self._signals:
            return
        if values_T is not None and len(values_T) != self._num_tokens:
            raise TraceError(
                f"layer {layer} computes {len(values_T)} tokens in a step of {self._num_tokens}: "
                "only models that compute each token of a step can be recorded"
            )
        if values_T is None:
            rest = map(str, sorted(self._signals - {signal}))
            raise TraceError(
                f"the routers of this model return no {signal}: "
                f"record without it: signals=[{','.join(rest)}]"
            )
        half = to_half(self._kept(values_T), signal, layer)
        self._pieces[column_name(signal, layer)].append(half)

    def _kept(self, values_T: NDArray) -> NDArray:
        if self._kept_N is None:
            return values_T
        # `take` gathers rows three times as fast as an index does.
        return values_T.take(self._kept_N, axis=0)

    def take(self) -> dict[str, NDArray]:
        """Returns the unit's columns, by request and token, and empties the recorder."""
        whole = {}
        order = np.lexsort(
            (np.concatenate(self._pieces["position"]), np.concatenate(self._pieces["request"]))
        )
        for name in list(self._pieces):
            whole[name] = np.concatenate(self._pieces.pop(name)).take(order, axis=0)
        return whole


def check_recordable(
    config: PreTrainedConfig, prompts: Sequence[EncodedPrompt], settings: RecordingSettings
) -> None:
    """Check that traces of these prompts can be made of a model.

    Raises:
        TraceError: the model has an encoder, or prompt and generated tokens can exceed its context.
    """
    if config.is_encoder_decoder:
        raise TraceError(
            f"{config.model_type} has an encoder: a token goes through the layers of the encoder "
            "or of the decoder, and a trace has all layers for each token. Such models can be "
            "served (moecast serve), not recorded"
        )
    context, longest = context_length(config), max(len(prompt.tokens) for prompt in prompts)
    if context is not None and longest + settings.new_tokens > context:
        raise TraceError(
            f"prompts of {longest} tokens and data.max_new_tokens={settings.new_tokens} exceed the "
            f"model's context of {context}: lower data.max_prompt_tokens or data.max_new_tokens"
        )


@dataclass(frozen=True)
class UnitRecorder:
    """A loaded model that records units of a plan."""

    model: PreTrainedModel
    plan: TracePlan
    work: Sequence[Sequence[EncodedPrompt]]
    """Prompts of each unit."""
    settings: RecordingSettings

    @classmethod
    def load(cls, job: RecordingJob) -> "UnitRecorder":
        """Loads the model of a job, which the caller closes.

        Raises:
            TraceError: this model cannot be recorded, or prompts exceed its context.
        """
        from runtime import load

        # Before the weights are read.
        assert job.prompts, "a source without texts is an error already"
        check_recordable(read_config(resolve(job.model)), job.prompts, job.settings)
        # Recording needs no forecasts, and the predictors are not trained yet.
        model = load(job.model, budget=job.budget, system=SystemConfig())
        return cls(model, *job.plan(model.moecast.spec), job.settings)

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
                dataset=self.plan.dataset,
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
    model.generate(
        tokens_BS.to(model.device),
        attention_mask=mask_BS.to(model.device),
        generation_config=GenerationConfig(
            max_new_tokens=settings.new_tokens + 1,
            eos_token_id=eos_ids or None,
            pad_token_id=padding,
            **drawing_options(settings.temperature, top_p=settings.top_p, top_k=0),
        ),
    )
