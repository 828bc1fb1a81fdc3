"""One task, alone in its process: load, answer the requests, measure.

Shape suffixes: B rows of the batch, S positions with padding.
"""

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from predictors.errors import MoecastError
from runtime.engine.engine import Engine
from runtime.engine.loading import choose_device, load
from runtime.engine.machine import peak_memory_bytes
from runtime.engine.plain import load_plain
from runtime.hf.tokens import pad_batch, pad_token_id
from runtime.store.model_source import resolve
from runtime.tools.bench.popular import needs_counts, with_counts
from runtime.tools.bench.requests import Request
from runtime.tools.bench.tasks import Plain, Replayed, Served, Task


def respond(task: Task) -> dict[str, Any]:
    """What the task asks for, as plain values.

    Raises:
        MoecastError: it can not be done, with the cause.
    """
    if isinstance(task, Served):
        return serve(task)
    if isinstance(task, Plain):
        return answer_plainly(task)
    assert isinstance(task, Replayed)
    from runtime.tools.bench.bound import replay_bounds

    return replay_bounds(task)


class Mark(LogitsProcessor):
    """Called after every forward pass: keeps the engine's sums as they are after the first."""

    def __init__(self, engine: Engine | None):
        self._engine = engine
        self.after_prefill: dict[str, float] | None = None

    def __call__(self, _tokens: Tensor, scores: Tensor) -> Tensor:
        if self.after_prefill is None and self._engine is not None:
            self.after_prefill = sums(self._engine)
        return scores


def sums(engine: Engine) -> dict[str, float]:
    """Everything that only grows while a model serves; times in seconds."""
    return {
        **engine.cache.total_counters().as_dict(),
        "stall_seconds": engine.stats.stall_seconds,
        "predictor_seconds": engine.driver.seconds,
        "link_seconds": sum(worker.busy_seconds for worker in engine.workers[-1:]),
    }


def continued(model: PreTrainedModel, request: Request, mark: Mark) -> list[list[int]]:
    """Each row's greedy tokens; an end-of-sequence token does not end it."""
    pad = pad_token_id(model)
    tokens_BS, mask_BS = pad_batch(request.prompts, pad)
    output = model.generate(
        tokens_BS.to(model.device),
        attention_mask=mask_BS.to(model.device),
        min_new_tokens=request.new_tokens,
        max_new_tokens=request.new_tokens,
        do_sample=False,
        pad_token_id=pad,
        logits_processor=LogitsProcessorList([mark]),
    )
    return output[:, tokens_BS.shape[1] :].tolist()


@dataclass
class Phases:
    """Sums over the measured requests, by phase."""

    prefill: dict[str, float] = field(default_factory=dict)
    decode: dict[str, float] = field(default_factory=dict)

    def add(self, before: dict[str, float], between: dict[str, float], after: dict[str, float]):
        """One request's: what grew in its prefill, and what grew after it."""
        for phase, start, end in ((self.prefill, before, between), (self.decode, between, after)):
            for key in end:
                phase[key] = phase.get(key, 0) + end[key] - start[key]


def serve(task: Served) -> dict[str, Any]:
    """Tokens of every request; times, sums and memory of those that are measured."""
    task = replace(task, system=with_counts(task.system, task.model, task.entries))
    model = load(
        task.model,
        predictor=task.predictor if task.system.prefetch else None,
        budget=task.budget,
        system=task.system,
        device=task.device,
        store=task.store,
        entries=task.entries,
        trace_events=task.trace_events,
    )
    with model.moecast as handle:
        engine = handle.engine
        require_predictor(task, engine)
        phases, tokens = Phases(), []
        ttft, tpot, seconds = [], [], 0.0
        for request in task.requests:
            mark, before = Mark(engine), sums(engine)
            first = len(engine.stats.decode_seconds)
            started = time.perf_counter()
            tokens.append(continued(model, request, mark))
            if not request.is_measured:
                continue
            seconds += time.perf_counter() - started
            assert mark.after_prefill is not None
            phases.add(before, mark.after_prefill, sums(engine))
            ttft.append(engine.stats.prefill_seconds[-1])
            tpot += engine.stats.decode_seconds[first:]
        adaptive_prefetch = engine.report()["adaptive_prefetch"]
        return {
            "tokens": tokens,
            "ttft_seconds": ttft,
            "tpot_seconds": tpot,
            "wall_seconds": seconds,
            "prefill": phases.prefill,
            "decode": phases.decode,
            "adaptive_prefetch": adaptive_prefetch,
            "predictor": engine.driver.forecasts_with,
            "reuse_predictor": engine.driver.keeps_by,
            "note": note(task, engine),
            "arena_bytes": engine.arena_bytes,
            "arena_slots": engine.cache.top.cache.num_slots,
            "weights_bytes": weights_bytes(model),
            "peak_memory_bytes": peak_memory_bytes(),
            "threads": torch.get_num_threads(),
        }


def require_predictor(task: Served, engine: Engine) -> None:
    """A system without what it forecasts with is another system, and must not stand for it.

    Raises:
        MoecastError: with what would give it one.
    """
    wanted = task.predictor or task.system.predictor
    if task.system.prefetch and wanted is not None and engine.driver.forecasts_with is None:
        raise MoecastError(
            f"no zoo entry of kind {wanted} for {task.model.name}: python -m train "
            f"predictor={wanted} makes one; entries=FOLDER or predictor=NAME give another"
        )


def note(task: Served, engine: Engine) -> str | None:
    """What the reader of the row must know."""
    if needs_counts(task.system):
        return f"LRU for its first steps: no zoo entry of kind popularity for {task.model.name}"
    wanted = task.system.reuse_predictor
    if wanted is None or engine.driver.keeps_by is not None:
        return None
    return f"kept by usage counts: no zoo entry of kind {wanted} for {task.model.name}"


def weights_bytes(model: PreTrainedModel) -> int:
    """Of everything in memory that is not an expert."""
    tensors = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    return sum(tensors.values())


def answer_plainly(task: Plain) -> dict[str, Any]:
    """The tokens of Transformers' own eager experts, by batch size and request."""
    dtype = "auto" if task.model.dtype == "auto" else getattr(torch, task.model.dtype)
    model = load_plain(resolve(task.model), dtype=dtype).to(choose_device(task.device))
    return {
        str(batch): [continued(model, request, Mark(None)) for request in requests]
        for batch, requests in task.requests.items()
    }
