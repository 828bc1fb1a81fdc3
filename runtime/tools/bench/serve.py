"""Child-process tasks of the bench: serve requests and measure, or run plain Transformers.

Shape suffixes: B rows of the batch, S positions with padding.
"""

import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from predictors.errors import MoecastError
from runtime.config import ModelConfig, SystemConfig
from runtime.engine.devices import choose_device
from runtime.engine.engine import Engine
from runtime.engine.forecasters import locate_predictor
from runtime.engine.loading import LoadOptions, load_model
from runtime.engine.memory import freeze_objects, peak_memory_bytes
from runtime.hf.forced_routing import force_routing
from runtime.hf.layers import find_moe_layers
from runtime.hf.loading import count_weight_bytes
from runtime.hf.tokens import pad_batch, pad_token_id
from runtime.policy.budget import Budget
from runtime.policy.counters import sum_counters
from runtime.store.model_source import identity, resolve
from runtime.tools.bench.config import BenchConfig
from runtime.tools.bench.tasks import BenchRequest, RequestsTask, ServedRun, ServeTask, Tokens
from runtime.tools.verify.reference import load_plain_model

QUIET_SECONDS = 1.0
"""Time without a transfer after which links rest; a queued prefetch may find no slot."""


class PrefillMark(LogitsProcessor):
    """Reads the engine's counters after the first forward pass, which is the prefill."""

    def __init__(self, engine: Engine | None):
        self._engine = engine
        self.after_prefill: dict[str, float] | None = None

    def __call__(self, _tokens: Tensor, scores: Tensor) -> Tensor:
        if self.after_prefill is None and self._engine is not None:
            self.after_prefill = read_counters(self._engine)
        return scores


def read_counters(engine: Engine) -> dict[str, float]:
    """Read all counters of an engine that only grow; times in seconds."""
    return {
        **sum_counters(engine.cache.counters).as_dict(),
        "stall_seconds": engine.loop.stall_seconds,
        "predictor_seconds": engine.driver.seconds,
        "link_seconds": engine.loop.links[-1].busy_seconds,
    }


def wait_for_links(engine: Engine) -> None:
    """Wait until links rest, as they would while a user reads the first answer.

    Systems that fetch in idle time would else fill their memory during the measured requests.
    """
    moved_bytes, quiet_since = -1, time.monotonic()
    while engine.move_when_idle() and time.monotonic() - quiet_since < QUIET_SECONDS:
        moved = sum(link.moved_bytes for link in engine.loop.links)
        if moved != moved_bytes:
            moved_bytes, quiet_since = moved, time.monotonic()
        time.sleep(0.01)


def generate_tokens(
    model: PreTrainedModel, request: BenchRequest, mark: PrefillMark
) -> list[list[int]]:
    """Generate greedy tokens for each row; an end-of-text token does not end it."""
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


def run_serve_task(task: ServeTask) -> dict[str, Any]:
    """Serve all requests and return a `ServedRun` as a dictionary.

    Raises:
        MoecastError: the model or the system's predictor is missing.
    """
    config = task.config
    system = with_counts(task.case.variant.system, config.model, config.entries)
    model = load_model(
        LoadOptions(
            model=config.model,
            predictor=config.predictor if system.prefetch else None,
            budget=Budget.parse(task.case.condition.budget),
            system=system,
            devices=[choose_device(config.device)],
            store=config.store,
            entries=config.entries,
            forced_routing=config.routing is not None,
        )
    )
    with model.moecast as handle, force_routing(handle.layers, config.routing):
        engine = handle.engine
        require_predictor(config, system, engine)
        freeze_objects()
        # Growth during the prefills of the measured requests, and after them.
        prefill, decode = Counter[str](), Counter[str]()
        tokens = []
        ttft, tpot, seconds = [], [], 0.0
        for request in task.requests:
            mark, before = PrefillMark(engine), read_counters(engine)
            first = len(engine.stats.decode_seconds)
            started = time.perf_counter()
            tokens.append(generate_tokens(model, request, mark))
            if not request.is_measured:
                wait_for_links(engine)
                continue
            seconds += time.perf_counter() - started
            assert mark.after_prefill is not None
            after = read_counters(engine)
            prefill.update({key: mark.after_prefill[key] - before[key] for key in before})
            decode.update({key: after[key] - mark.after_prefill[key] for key in after})
            ttft.append(engine.stats.prefill_seconds[-1])
            tpot += engine.stats.decode_seconds[first:]
        run = ServedRun(
            tokens=tokens,
            ttft_seconds=ttft,
            tpot_seconds=tpot,
            wall_seconds=seconds,
            prefill=dict(prefill),
            decode=dict(decode),
            adaptive_prefetch=engine.report()["adaptive_prefetch"],
            predictor=engine.driver.predictor_kind,
            reuse_predictor=engine.driver.reuse_predictor_kind,
            note=describe_deviation(config, system, engine),
            arena_bytes=engine.arena_bytes,
            arena_slots=engine.cache.top.cache.num_slots,
            weights_bytes=count_weight_bytes(model),
            peak_memory_bytes=peak_memory_bytes(),
        )
        return asdict(run)


def require_predictor(config: BenchConfig, system: SystemConfig, engine: Engine) -> None:
    """Refuse to run a system without the predictor that its definition names.

    Raises:
        MoecastError: no entry was found, and the message tells how to make one; or a log forces the
            routing and the predictor looks at states.
    """
    wanted = config.predictor or system.predictor
    if system.prefetch and wanted is not None and engine.driver.predictor_kind is None:
        if config.routing is not None:
            raise MoecastError(
                f"{wanted} looks at states, which a forced routing does not depend on, or has no "
                f"zoo entry for {config.model.name}"
            )
        raise MoecastError(
            f"no zoo entry of kind {wanted} for {config.model.name}: moecast train "
            f"predictor={wanted} makes one; or name another with entries=FOLDER or predictor=NAME"
        )


def describe_deviation(config: BenchConfig, system: SystemConfig, engine: Engine) -> str | None:
    """Describe how the run deviates from its system's definition; None if it does not."""
    if needs_counts(system):
        return f"LRU for its first steps: no zoo entry of kind popularity for {config.model.name}"
    wanted = system.reuse_predictor
    if wanted is None or engine.driver.reuse_predictor_kind is not None:
        return None
    if config.routing is not None:
        return "forecasts and evicts by counts: a forced routing does not depend on states"
    return f"evicts by usage counts: no zoo entry of kind {wanted} for {config.model.name}"


def run_plain_task(task: RequestsTask) -> dict[str, Any]:
    """Generate with Transformers' eager experts; tokens by batch size and request."""
    model = load_plain_model(task.config.model, choose_device(task.config.device))
    tokens: dict[str, Tokens] = {}
    for batch, requests in task.requests.items():
        with force_routing(find_moe_layers(model), task.config.routing):
            tokens[str(batch)] = [
                generate_tokens(model, request, PrefillMark(None)) for request in requests
            ]
    return tokens


PARTS = 1_000_000
"""Scale from shares to the integer counts that the `static` policy takes."""


def needs_counts(system: SystemConfig) -> bool:
    """Return whether a static system would have to learn its fixed set during the measurement."""
    return system.eviction == "static" and not system.eviction_options.get("counts")


def with_counts(system: SystemConfig, model: ModelConfig, entries: Path | None) -> SystemConfig:
    """Give a static system its fixed set from the zoo's popularity entry.

    Returns the same system if it needs no counts or no entry has them.

    Raises:
        ZooError: the entry is damaged.
    """
    if not needs_counts(system):
        return system
    from zoo.load import load_predictor

    own = identity(resolve(model), model)
    where = locate_predictor("popularity", own, name=model.name, entries=entries)
    if where is None:
        return system
    popularity = load_predictor(where, spec=None, options={"ahead": None})
    token = np.zeros(1, dtype=np.int64)
    shares_LE = np.stack(
        [forecast.scores_TE[0] for forecast in popularity.begin_step(token, token)]
    )
    counts = np.rint(PARTS * shares_LE).astype(int).tolist()
    return replace(system, eviction_options={**system.eviction_options, "counts": counts})
