"""Measures this machine with a loaded model, the `local` hardware profile, and a model's shape.

One token after the same context is computed repeatedly. From the second time on all its experts are
in memory, so that only the computation and the runtime's bookkeeping take time. The same with as
many threads reading as while serving shows how much each slows the other: two reads at once need
more of a small processor than one.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from predictors.base import Signal
from predictors.spec import ModelSpec
from runtime.config import ModelConfig, ShapeConfig, SystemConfig
from runtime.engine.assembly import EngineOptions, connect
from runtime.engine.engine import Engine
from runtime.hf.experts import compute_expert
from runtime.hf.layers import MoeLayer, attach_experts, find_top_k
from runtime.hf.loading import StrippedModel, load_stripped
from runtime.hf.probes import Probes
from runtime.policy.eviction.base import Expert
from runtime.policy.tier import TransferTask
from runtime.profiling.bandwidth import ProbeReader, Reads, measure_reads, seconds, trimmed_mean
from runtime.sim.hardware import MeasuredHardware, Overheads, nearest_latencies
from runtime.store.base import ExpertStore, max_slot_bytes
from runtime.store.ggml.matrix import ExpertWeights, QuantisedExpert
from runtime.store.layout import ExpertLayout
from runtime.store.model_source import resolve
from runtime.transfer.arena import Arena
from runtime.transfer.file_ring import STORE_THREADS, StoreRing
from runtime.transfer.thread_ring import make_arrivals

PROMPT_TOKENS = 32
"""Before the token that is computed again: attention over a few dozen, as in the outlook."""
STEPS = 12
"""Steps without, and as many with reading threads."""
EXPERT_TOKENS = 16
PREDICTOR_KIND = "mlp"
PREDICTOR_SECONDS = 60e-6
"""onnxruntime, 2048-512-64, one thread, batch 1: the time of a prediction of `PREDICTOR_KIND` where
the model that was measured made none."""
SILENT = 20e-6
"""A predictor that answers nothing to an event takes less, one that answers takes more."""

Span = tuple[float, float]


@dataclass
class Spans:
    """Records what a `TimelineSink` receives of the computation, in times of `perf_counter`."""

    layers: list[tuple[int, float, float]] = field(default_factory=list)
    """Layer without its routed experts: from the last expert before it to its router's output."""
    experts: list[tuple[float, float]] = field(default_factory=list)
    predictions: list[tuple[float, float]] = field(default_factory=list)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)

    def clear(self) -> None:
        for spans in vars(self).values():
            spans.clear()

    def transferred(
        self, link: str, task: TransferTask, start: float, end: float, *, track: str
    ) -> None:
        """Do nothing: the parts of the computation are recorded."""

    def computed(self, expert: Expert, start: float, end: float) -> None:
        del expert
        self.experts.append((start, end))

    def stalled(self, layer: int, start: float, end: float) -> None:
        """The computation waited for bytes."""
        del layer
        self.stalls.append((start, end))

    def computed_dense(self, layer: int, start: float, end: float) -> None:
        """The computation was at something else than routed experts, up to `layer`'s router."""
        self.layers.append((layer, start, end))

    def predicted(self, event: str, layer: int, start: float, end: float) -> None:
        """A predictor answered an event."""
        del event, layer
        self.predictions.append((start, end))

    def step(self, num_tokens: int, start: float, end: float) -> None:
        del num_tokens
        self.steps.append((start, end))

    def close(self) -> None:
        """Do nothing: there is no file."""


def measure(model: PreTrainedModel) -> MeasuredHardware:
    """Measure this machine with a model that `runtime.load` loaded; takes a few seconds.

    Its engine and predictor are used: the arena then holds the experts of one token, and the
    counters have advanced.

    Raises:
        TransferError: its experts cannot be read.
    """
    return _measured(model, model.moecast.layers, model.moecast.engine)


def measure_stripped(
    stripped: StrippedModel, store: ExpertStore, spec: ModelSpec
) -> MeasuredHardware:
    """Measure as `measure` does, for a stripped model and the store of its experts.

    The model is served on demand meanwhile. Attach another source of experts afterwards.

    Raises:
        TransferError: its experts cannot be read.
    """
    arena = Arena(store.layouts, (spec.num_layers + 1) * spec.top_k)
    arrivals = make_arrivals()
    engine = connect(
        store,
        spec,
        [[(arena, StoreRing(arrivals, store, arena, closes=False))]],
        arrivals,
        EngineOptions(
            system=SystemConfig(prefetch=False, per_layer=False, chunked=False, reordered=False)
        ),
    )
    attach_experts(stripped.layers, engine)
    try:
        with Probes(stripped.model, {Signal.ROUTED}, engine, layers=stripped.layers):
            return _measured(stripped.model, stripped.layers, engine)
    finally:
        engine.close()


@torch.no_grad()
def _measured(
    model: PreTrainedModel, layers: Sequence[MoeLayer], engine: Engine
) -> MeasuredHardware:
    store, spans = engine.store, Spans()
    timeline = engine.swap_timeline(spans)
    try:
        step = _same_token(model)
        prompt_layers = [end - start for layer, start, end in spans.layers if layer]
        for _ in range(3):
            step()  # until all experts that it needs are cached
        before = measure_reads(store)
        spans.clear()
        for _ in range(STEPS):
            step()
        alone = average_steps(spans)
        spans.clear()
        chunk_times: list[float] = []
        with ProbeReader(store, num_threads=STORE_THREADS) as reader:
            for _ in range(STEPS):
                chunk_times += reader.keep_busy()
                step()
            chunk_times += reader.close()
        slowed = average_steps(spans)
        after = measure_reads(store)
    finally:
        engine.swap_timeline(timeline)
    kind = engine.driver.predictor_kind
    reads = _mean(before, after)
    chunk_together = reads.chunk / reads.speed_together
    one_token, many_tokens = _expert_seconds(model, layers[0], store)
    expert_per_token = max(0.0, many_tokens - one_token) / (EXPERT_TOKENS - 1)
    layer_per_token = max(0.0, trimmed_mean(prompt_layers) - alone.layer) / (PROMPT_TOKENS - 1)
    return MeasuredHardware(
        name="local",
        # An expert is one transfer, whose parts a ring reads at once where they lie together.
        chunk_bytes=(sum(reader.sizes),),
        transfer_fixed=reads.fixed,
        transfer_per_byte=reads.per_byte,
        # What was measured are times of one token.
        layer_fixed=max(0.0, alone.layer - layer_per_token),
        layer_per_token=layer_per_token,
        expert_fixed=max(0.0, alone.expert - expert_per_token),
        expert_per_token=expert_per_token,
        predictor_seconds=alone.prediction or PREDICTOR_SECONDS,
        predictor_latencies=nearest_latencies(
            kind if kind is not None and alone.prediction else PREDICTOR_KIND,
            hidden_size=model.config.get_text_config().hidden_size,
            num_experts=store.num_layers * store.num_experts,
        ),
        step_seconds=alone.total,
        overheads=Overheads(
            step_seconds=alone.rest,
            predictor_inline=True,
            num_readers=STORE_THREADS,
            transfer_speed_together=reads.speed_together,
            transfer_speed_computing=min(1.0, chunk_together / trimmed_mean(chunk_times)),
            compute_speed_transferring=min(1.0, alone.total / slowed.total),
        ),
    )


def _mean(first: Reads, second: Reads) -> Reads:
    pairs = zip(vars(first).values(), vars(second).values(), strict=True)
    return Reads(*(statistics.fmean(pair) for pair in pairs))


@dataclass(frozen=True)
class StepParts:
    """Durations of the parts of a decode step, in seconds."""

    layer: float
    """One layer without routed experts and prediction."""
    expert: float
    """One expert, including its choice and the release of its slot."""
    prediction: float
    """One prediction with forecasts, including their scheduling; 0 without any."""
    rest: float
    """All time outside of layers."""
    total: float


def average_steps(spans: Spans) -> StepParts:
    """Return the median of each part over the recorded steps."""
    steps = [vars(split_step(spans, *step)).values() for step in spans.steps]
    return StepParts(*(statistics.median(column) for column in zip(*steps, strict=True)))


def split_step(spans: Spans, began: float, ended: float) -> StepParts:
    """The step between two times, taken apart, without its waits for bytes.

    Layers are without the predictions in them.
    """

    def within(pairs: Iterable[Span]) -> list[Span]:
        return [(start, end) for start, end in pairs if began <= start and end <= ended]

    layers = within((start, end) for _, start, end in spans.layers)
    experts = within(spans.experts)
    asked = [span for span in within(spans.predictions) if sum_spans([span]) > SILENT]
    stalled = sum_spans(within(spans.stalls))  # where an expert is not kept after its use
    total = ended - began - stalled
    if not experts:
        # Modules with their own loop do not report when they compute: all time is the layers'.
        return StepParts(total / max(1, len(layers)), 0.0, 0.0, 0.0, total)
    # From a layer's router to where the next layer's span begins, all is about its experts, but
    # predictions from its router's input and choice.
    turns = [start for start, _ in layers[1:]] + [experts[-1][1]]
    within_layers = sum_spans(
        (start, end)
        for start, end in asked
        if any(first <= start and end <= last for first, last in layers[1:])
    )
    within_first = sum_spans(span for span in asked if span[1] <= layers[0][1])
    waited = sum_spans(asked)
    computing = sum(turn - end for (_, end), turn in zip(layers, turns, strict=True))
    computing -= stalled + waited - within_layers - within_first
    later = (sum_spans(layers[1:]) - within_layers) / max(1, len(layers) - 1)
    return StepParts(
        layer=later,
        expert=computing / len(experts),
        prediction=waited / len(asked) if asked else 0.0,
        rest=max(0.0, total - computing - later * len(layers) - waited),
        total=total,
    )


def sum_spans(spans: Iterable[Span]) -> float:
    """Return the total duration."""
    return sum(end - start for start, end in spans)


def _same_token(model: PreTrainedModel) -> Callable[[], object]:
    """Runs a prompt, and returns what computes one more token after it, the same each time.

    Where a model keeps no context that can be cut back, a token without any stands for it.
    """
    prompt = torch.ones(1, PROMPT_TOKENS, dtype=torch.long)
    token = prompt[:, :1]
    if model.config.is_encoder_decoder:
        model(prompt, decoder_input_ids=token, use_cache=False)
        return lambda: model(token, decoder_input_ids=token, use_cache=False)
    past: Any = getattr(model(prompt, use_cache=True), "past_key_values", None)
    if not hasattr(past, "crop"):
        return lambda: model(token, use_cache=False)
    if hasattr(past, "activate_past_recording"):
        past.activate_past_recording()  # or a full window could not be cut back

    def again() -> None:
        model(token, past_key_values=past, use_cache=True)
        past.crop(-1)

    return again


def _expert_seconds(
    model: PreTrainedModel, layer: MoeLayer, store: ExpertStore
) -> tuple[float, float]:
    """Return the seconds of one expert on one token and on `EXPERT_TOKENS`."""
    slot = torch.empty(max_slot_bytes(store), dtype=torch.uint8).zero_()
    run = make_expert_call(layer, store.layouts[0], slot)
    width = model.config.get_text_config().hidden_size
    hidden = torch.zeros(EXPERT_TOKENS, width, dtype=model.dtype)
    times = [(seconds(lambda: run(hidden[:1])), seconds(lambda: run(hidden))) for _ in range(7)]
    one_token, many_tokens = (statistics.median(column) for column in zip(*times, strict=True))
    return one_token, many_tokens


def make_expert_call(
    layer: MoeLayer, layout: ExpertLayout, slot: Tensor
) -> Callable[[Tensor], object]:
    """Return a call of the slot's expert on hidden states `(tokens, hidden)`; it decodes each time.

    For modules with their own loop it is a product with as many weights.
    """
    views = layout.weights(slot) if layout.views_are_weights else None

    def read() -> ExpertWeights:
        return layout.weights(slot) if views is None else views

    if layer.adapter.name == "interface":
        return lambda hidden: compute_expert(layer.experts, read(), hidden)
    weights = read()
    assert not isinstance(weights, QuantisedExpert), "it computes with tensors"
    tensors = [weight for weight in weights.values() if isinstance(weight, Tensor)]
    largest = max(tensors, key=Tensor.numel)
    width = largest.shape[-1]
    rows = sum(weight.numel() for weight in tensors) // width
    matrix = torch.zeros(rows, width, dtype=largest.dtype)
    return lambda hidden: (read(), hidden.new_zeros(len(hidden), width) @ matrix.T)


def read_model_shape(config: ModelConfig) -> ShapeConfig:
    """Sizes read from the model's checkpoint, in the dtype that `config` loads it in.

    A layer's other weights are all that are neither experts nor embeddings, evenly divided over the
    layers with experts.

    Raises:
        CheckpointError: the model is not on this machine.
    """
    stripped = load_stripped(resolve(config), config.dtype)
    model, layers, store = stripped.model, stripped.layers, stripped.open_store()
    try:
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        # A file's own rows are buffers.
        ends_bytes = {
            t.data_ptr()
            for end in ends
            if end is not None
            for t in chain(end.parameters(), end.buffers())
        }
        others = {t.data_ptr(): t.nbytes for t in chain(model.parameters(), model.buffers())}
        body = sum(size for place, size in others.items() if place not in ends_bytes)
        text = model.config.get_text_config()
        return ShapeConfig(
            name=config.name,
            source=f"the checkpoint of {config.name}",
            num_layers=len(layers),
            num_experts=store.num_experts,
            top_k=find_top_k(model, layers),
            hidden_size=text.hidden_size,
            expert_bytes=max_slot_bytes(store),
            layer_bytes=body // len(layers),
        )
    finally:
        store.close()
