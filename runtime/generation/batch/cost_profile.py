"""Measure the planner's costs on this machine with a loaded model.

Measurements are stored in a file (Klotski, section 7: "these results are cached locally").
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from predictors.errors import DiskFullError
from predictors.files import find_cache_folder, write_json
from predictors.origin import read_processor_name
from runtime.accelerator import is_accelerator, open_accelerator, synchronize
from runtime.config import StoreConfig
from runtime.generation.batch.dense_placement import measure_dense_transfers
from runtime.generation.batch.group_planner import PlannerCosts
from runtime.generation.batch.prompts import Batch
from runtime.hf.kv import CacheSize, count_cache_bytes, measure_cache_size
from runtime.hf.layers import MoeLayer
from runtime.hf.tokens import pad_batch, pad_token_id
from runtime.profiling.bandwidth import seconds, trimmed_mean
from runtime.profiling.facts import count_usable_cores, list_gpus, versions
from runtime.profiling.local import make_expert_call, measure
from runtime.store.base import max_slot_bytes

log = logging.getLogger(__name__)

TIMED_STEPS = 3
"""Number of decode steps of one batch that are timed, after its prompts."""
TIMED_TOKENS = (1, 64)
"""Numbers of tokens on a timed expert: the difference is the cost per token."""
REPEATS = 7
FORMAT = 6


@dataclass(frozen=True)
class CostProfile:
    """The planner's costs, and the size of a row's KV cache."""

    costs: PlannerCosts
    cache: CacheSize
    was_known: bool = False
    """True if an earlier run measured them."""


@torch.no_grad()
def measure_costs(model: PreTrainedModel, batch: Batch, store: StoreConfig) -> CostProfile:
    """Measure on the batch's prompts and a few decode steps, the dense weights in memory.

    A predictor that learns online keeps what it learns from them, as warm-up.

    Raises:
        TransferError: experts cannot be read.
    """
    layers = model.moecast.layers
    clock = LayerClock(layers, model.device)
    with clock:
        cache = _run_steps(model, batch, clock)
    attention, gate = clock.typical()
    dense = measure_dense_transfers(model, store, with_gates=gate > 0)
    if model.device.type == "cpu":
        costs = _cpu_costs(model, attention, gate, dense)
    else:
        costs = _device_costs(model, layers[0], attention, gate, dense)
    return CostProfile(costs, cache)


def _cpu_costs(
    model: PreTrainedModel, attention: float, gate: float, dense_io: tuple[float, float]
) -> PlannerCosts:
    """Costs on a CPU, where reads and computation share the cores and slow each other down."""
    with model.moecast.engine.driver.paused():
        machine = measure(model)
    slow = 1 / max(0.05, machine.overheads.compute_speed_transferring)
    speed = max(0.05, machine.overheads.transfer_speed_computing)
    read = machine.transfer_seconds(sum(machine.chunk_bytes))
    return PlannerCosts(
        attention=attention * slow,
        gate=gate * slow,
        expert_fixed=machine.expert_fixed * slow,
        expert_per_token=machine.expert_per_token * slow,
        expert_io=read / speed,
        attention_io=dense_io[0] / speed,
        gate_io=dense_io[1] / speed,
    )


def _device_costs(
    model: PreTrainedModel,
    layer: MoeLayer,
    attention: float,
    gate: float,
    dense_io: tuple[float, float],
) -> PlannerCosts:
    """Costs on a GPU, where copies overlap with computation."""
    engine, device = model.moecast.engine, model.device
    size = max_slot_bytes(engine.store)
    accelerator = open_accelerator(device)
    assert accelerator is not None
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=accelerator.pins_memory)
    slot = torch.zeros(size, dtype=torch.uint8, device=device)
    run = make_expert_call(layer, engine.store.layouts[0], slot)
    width = model.config.get_text_config().hidden_size
    few, many = (
        torch.zeros(count, width, dtype=model.dtype, device=device) for count in TIMED_TOKENS
    )

    def time_synchronised(what: Callable[[], object]) -> float:
        def both() -> None:
            what()
            synchronize(device)

        both()
        return trimmed_mean([seconds(both) for _ in range(REPEATS)])

    one, more = time_synchronised(lambda: run(few)), time_synchronised(lambda: run(many))
    per_token = max(0.0, more - one) / (TIMED_TOKENS[1] - TIMED_TOKENS[0])
    return PlannerCosts(
        attention=attention,
        gate=gate,
        expert_fixed=max(0.0, one - TIMED_TOKENS[0] * per_token),
        expert_per_token=per_token,
        expert_io=time_synchronised(lambda: slot.copy_(host, non_blocking=True)),
        attention_io=dense_io[0],
        gate_io=dense_io[1],
    )


def _run_steps(model: PreTrainedModel, batch: Batch, clock: "LayerClock") -> CacheSize:
    """Run the prompts and the timed decode steps; returns the size of a row's KV cache."""
    tokens_BT, mask_BT = (
        part.to(model.device)
        for part in pad_batch([prompt.tokens for prompt in batch], pad_token_id(model))
    )
    if model.config.is_encoder_decoder:
        clock.is_enabled = True
        first_B1 = tokens_BT[:, :1]
        model(tokens_BT, attention_mask=mask_BT, decoder_input_ids=first_B1, use_cache=False)
        return measure_cache_size(model)
    output: Any = model(tokens_BT, attention_mask=mask_BT, use_cache=True)
    clock.is_enabled = True
    before = count_cache_bytes(output.past_key_values)
    for _ in range(TIMED_STEPS):
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(batch), 1)], dim=1)
        output = model(
            output.logits[:, -1:].argmax(-1),
            attention_mask=mask_BT,
            past_key_values=output.past_key_values,
            use_cache=True,
        )
    return CacheSize.grown(
        before,
        count_cache_bytes(output.past_key_values),
        num_steps=TIMED_STEPS,
        num_rows=len(batch),
        num_tokens=mask_BT.shape[1],
    )


class LayerClock(ExitStack):
    """Times blocks, routers and experts with hooks while `is_enabled`; synchronises a GPU."""

    def __init__(self, layers: Sequence[MoeLayer], device: torch.device):
        super().__init__()
        self.is_enabled = False
        self._device = device
        self._seconds: dict[str, list[float]] = {"block": [], "router": [], "experts": []}
        for layer in layers:
            for kind, times in self._seconds.items():
                self._time(getattr(layer, kind), times)

    def _time(self, module: nn.Module, times: list[float]) -> None:
        started: list[float] = []

        def start(*_: object) -> None:
            if self.is_enabled:
                synchronize(self._device)
                started.append(time.perf_counter())

        def end(*_: object) -> None:
            if started:
                synchronize(self._device)
                times.append(time.perf_counter() - started.pop())

        self.callback(module.register_forward_pre_hook(start).remove)
        self.callback(module.register_forward_hook(end).remove)

    def typical(self) -> tuple[float, float]:
        """Typical seconds of attention and gate; 0 for modules that were not called.

        Attention is all of a block but its router and its experts.
        """
        block, gate, experts = (
            trimmed_mean(times) if times else 0.0 for times in self._seconds.values()
        )
        return max(0.0, block - gate - experts), gate


# ---- stored measurements


def load_or_measure(model: PreTrainedModel, batch: Batch, *, store: StoreConfig) -> CostProfile:
    """Load the measurement for this model, machine and batch, or measure now."""
    folder = find_cache_folder("measured")
    if folder is None:
        return measure_costs(model, batch, store)
    path = folder / f"{_cache_key(model, batch, store)}.json"
    if path.is_file():
        known = json.loads(path.read_bytes())
        costs, cache = PlannerCosts(**known["costs"]), CacheSize(**known["cache"])
        return CostProfile(costs, cache, was_known=True)
    profile = measure_costs(model, batch, store)
    try:
        write_json(path, asdict(profile))
    except (OSError, DiskFullError) as error:
        log.warning("the measurement is not kept for the next run: %s", error)
    return profile


def _cache_key(model: PreTrainedModel, batch: Batch, store: StoreConfig) -> str:
    """Hash of everything that times depend on; prompt lengths are rounded to powers of two."""
    about = {
        "format": FORMAT,
        "model": model.moecast.spec.as_dict(),
        "kernels": model.moecast.config.kernels,
        "folder": str(model.moecast.folder.resolve()),
        "slot_bytes": max_slot_bytes(model.moecast.engine.store),
        "store": [str(store.path), str(store.page_cache)],
        "quantises_attention": model.moecast.dense_codes is not None,
        "device": str(model.device),
        "processor": read_processor_name(),
        "cores": count_usable_cores(),
        "threads": torch.get_num_threads(),
        "gpus": list_gpus() if is_accelerator(model.device) else [],
        "versions": versions(),
        "rows": len(batch),
        "length": max(len(prompt.tokens) for prompt in batch).bit_length(),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
