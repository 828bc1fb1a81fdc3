"""Measures this machine with a loaded model: the `local` hardware profile."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from predictors.base import Signal
from runtime.hf.experts import expert_output
from runtime.hf.layers import MoeLayer, moe_layers
from runtime.hf.probes import Probes, SilentListener
from runtime.sim.hardware import Measured
from runtime.store.base import Store, slot_bytes

PROMPT_TOKENS = 64
REPEATS = 7
READS = 25
"""Of a chunk and of an expert each: a disk's times scatter more than a processor's."""
EXPERT_TOKENS = 16
PREDICTOR_SECONDS = 60e-6
"""onnxruntime, 2048-512-64, one thread, batch 1: the latency that is charged to a prediction."""


class _LayerClock(SilentListener):
    """Takes the time from a layer's entry to its router's answer."""

    def __init__(self) -> None:
        self.before_router: list[float] = []
        self._entered = 0.0

    def layer_input(self, *_: object) -> None:
        self._entered = time.perf_counter()

    def routed(self, *_: object) -> None:
        self.before_router.append(time.perf_counter() - self._entered)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _median_seconds(run: Callable[[], object]) -> float:
    return statistics.median(_seconds(run) for _ in range(REPEATS))


def _layer_seconds(model: PreTrainedModel, num_tokens: int) -> float:
    clock = _LayerClock()
    tokens = torch.ones(1, num_tokens, dtype=torch.long)
    with torch.no_grad(), Probes(model, {Signal.LAYER_INPUT, Signal.ROUTED}, clock):
        for _ in range(REPEATS):
            model(tokens, use_cache=False)
    return statistics.median(clock.before_router)


def _expert(layer: MoeLayer, weights: Mapping[str, Tensor]) -> Callable[[Tensor], object]:
    """One expert on hidden states `(tokens, hidden)`.

    Where the module has a loop of its own, one product with as many weights stands for it.
    """
    if layer.kind.name == "interface":
        return lambda hidden: expert_output(layer.experts, dict(weights), hidden)
    largest = max(weights.values(), key=Tensor.numel)
    width = largest.shape[-1]
    rows = sum(weight.numel() for weight in weights.values()) // width
    matrix = torch.zeros(rows, width, dtype=largest.dtype)
    return lambda hidden: hidden.new_zeros(len(hidden), width) @ matrix.T


def measure(model: PreTrainedModel) -> Measured:
    """Times of this machine for a model that `runtime.load` made; takes about a second.

    Transfers are reads of the store as the runtime does them; compute times come from running the
    model itself.
    """
    return measure_parts(model, moe_layers(model), model.moecast.engine.store)


def measure_parts(model: PreTrainedModel, layers: Sequence[MoeLayer], store: Store) -> Measured:
    """The same for a model with experts from anywhere, and the store that they would come from."""
    layout = store.layouts[0]
    slot = torch.empty(slot_bytes(store), dtype=torch.uint8)
    sizes = layout.chunk_bytes
    smallest, largest = sizes.index(min(sizes)), range(len(sizes))
    reads = iter(range(10_000))

    def read(chunks: range) -> None:
        i = next(reads)
        store.read(i % store.num_layers, i % store.num_experts, chunks, slot)

    # In turns, so that what else the disk is doing falls on both alike.
    pairs = [
        (_seconds(lambda: read(range(smallest, smallest + 1))), _seconds(lambda: read(largest)))
        for _ in range(READS)
    ]
    one, whole = (statistics.median(times) for times in zip(*pairs, strict=True))
    # Whole experts minus one chunk leave the marginal cost; what a chunk costs beyond is fixed.
    per_byte = max(0.0, whole - one) / max(1, sum(sizes) - sizes[smallest])
    weights = layout.weights(slot)
    hidden = torch.zeros(
        EXPERT_TOKENS, model.config.get_text_config().hidden_size, dtype=model.dtype
    )
    run = _expert(layers[0], weights)
    with torch.no_grad():
        expert_one = _median_seconds(lambda: run(hidden[:1]))
        expert_many = _median_seconds(lambda: run(hidden))
    layer_one = _layer_seconds(model, 1)
    layer_many = _layer_seconds(model, PROMPT_TOKENS)
    return Measured(
        name="local",
        chunk_bytes=tuple(sizes),
        transfer_fixed=max(0.0, one - per_byte * sizes[smallest]),
        transfer_per_byte=per_byte,
        layer_fixed=layer_one,
        layer_per_token=max(0.0, layer_many - layer_one) / (PROMPT_TOKENS - 1),
        expert_fixed=expert_one,
        expert_per_token=max(0.0, expert_many - expert_one) / (EXPERT_TOKENS - 1),
        predictor_seconds=PREDICTOR_SECONDS,
    )
