"""Time of the computation alone: a token's experts are all in memory, and no engine serves them."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from runtime.config import ModelConfig, StoreConfig
from runtime.hf.loading import load_configured
from runtime.store.base import max_slot_bytes

TOKENS = 21
"""Computed tokens, of which the median is taken."""


@dataclass(frozen=True, kw_only=True)
class ComputationTask:
    model: ModelConfig
    store: StoreConfig


@torch.no_grad()
def run_computation_task(task: ComputationTask) -> dict[str, Any]:
    """Compute the same token again and again; returns the median in seconds.

    Each of its experts has separate memory, so that no cache of the processor holds them all, as
    in a served run. There are no probes, no arena and no threads that read.
    """
    device = torch.device("cpu")
    stripped = load_configured(task.model, device)
    spec = stripped.spec(stripped.folder, task.model)
    store = stripped.open_experts(task.store, spec, [device])
    kept = spec.num_layers * spec.top_k * max_slot_bytes(store)
    stripped.read_on_demand(store, task.model, keep_bytes=kept)
    token = torch.ones(1, 1, dtype=torch.int64)
    times = []
    try:
        for _ in range(1 + TOKENS):
            started = time.perf_counter()
            stripped.model(token, use_cache=False)
            times.append(time.perf_counter() - started)
    finally:
        store.close()
    return {"seconds": statistics.median(times[1:])}
