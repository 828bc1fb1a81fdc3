"""Loads a Transformers model whose experts live in an arena of fixed size.

`ModelHandle` is its `model.moecast`.
"""

import logging
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from predictors.base import Predictor, Signal
from predictors.files import expand_home
from predictors.spec import ModelSpec
from runtime.accelerator import is_accelerator, open_accelerator
from runtime.config import AUTO, Exact, ModelConfig, ServedConfig, StoreConfig, SystemConfig
from runtime.engine.assembly import (
    EngineOptions,
    build_engine,
    needs_host_tier,
    size_tiers,
)
from runtime.engine.auto_budget import AutoBudget, FreeMemory, choose_budget, measure_free_memory
from runtime.engine.devices import choose_device, choose_devices
from runtime.engine.engine import Engine
from runtime.engine.forecasters import LearnedStore, load_system_predictors, require_predictor
from runtime.engine.memory import (
    freeze_while_loaded,
    keep_decoded,
    release_earlier_models,
    release_unused,
    unfreeze_objects,
)
from runtime.engine.out_of_memory import explain_out_of_memory
from runtime.engine.predictor_drift import DriftMonitor
from runtime.engine.timeline import ChromeTraceWriter
from runtime.errors import BudgetError, PlanError
from runtime.hf.adapters.base import LayerExperts
from runtime.hf.decode_step import apply_decode_threads
from runtime.hf.dense_stream import DenseStream
from runtime.hf.experts import runs_our_loop
from runtime.hf.grouped import (
    GroupedExperts,
    SlotSource,
    attach_grouped,
    choose_exact,
    find_model_obstacle,
    find_store_obstacle,
)
from runtime.hf.kv import estimate_cache_bytes
from runtime.hf.layers import MoeLayer, attach_experts, build_skip_predictor
from runtime.hf.loading import (
    StrippedModel,
    count_weight_bytes,
    find_model_class,
    load_configured,
    read_config,
)
from runtime.hf.model_faults import check_generates
from runtime.hf.probes import EventListener, Probes
from runtime.hf.sharing import choose_heights
from runtime.hf.strip import guard_model
from runtime.hf.tokens import context_length
from runtime.policy.budget import Budget
from runtime.policy.placement import RankPart
from runtime.presets import describe_choice
from runtime.store.base import (
    ExpertStore,
    describe_formats,
    max_decoded_bytes,
    max_slot_bytes,
)
from runtime.store.dense_source import DenseCodes
from runtime.store.model_source import resolve

log = logging.getLogger(__name__)

KV_TOKENS = 4096
"""Tokens of each sequence for whose KV cache `budget=auto` leaves room, if the context has as many;
a longer sequence uses the part of free memory that stays unused."""


class EngineInterface(EventListener, SlotSource, Protocol):
    """Receives a model's events and provides its experts."""


@dataclass(eq=False, kw_only=True, repr=False)
class ModelHandle:
    """Statistics and the end of a model that `runtime.load` has loaded; a context manager."""

    config: ModelConfig
    spec: ModelSpec
    folder: Path
    layers: Sequence[MoeLayer]
    engine: Engine
    probes: Probes
    experts: Sequence[LayerExperts | GroupedExperts]
    exact: Exact = Exact.EAGER
    """Transformers' implementation whose bits outputs have, where experts are not quantised."""
    block_heights: Sequence[int] = ()
    """Numbers of rows of blocks in which sequences of a group share products, ascending; none if
    each is computed by itself."""
    auto_budget: AutoBudget | None = None
    """The budget as computed from free memory; None for a budget that was given."""

    dense_stream: DenseStream | None = None
    """Moves the layers' dense weights; None while they are in memory."""

    dense_codes: DenseCodes | None = None
    """Codes of dense weights that were quantised; None: none were."""

    def connect(self, target: EngineInterface) -> None:
        """Send events and requests of experts to `target`; only between two forward passes."""
        self.probes.listener = target
        for experts in self.experts:
            experts.source = target

    @property
    def budget_bytes(self) -> int:
        """Size of the arena: no expert's bytes are anywhere else."""
        return self.engine.arena_bytes

    def stats(self) -> dict[str, Any]:
        """Counters, times (seconds) and memory (bytes) since the model was loaded."""
        return self.engine.report()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the transfer threads and close the files; the model cannot be used afterwards."""
        try:
            self.engine.close()
        finally:
            self.probes.close()
            if self.dense_stream is not None:
                self.dense_stream.close(restore=False)
            unfreeze_objects()


@dataclass(frozen=True, kw_only=True)
class KVReserve:
    """Memory for KV caches that `budget=auto` leaves free."""

    num_sequences: int = 1
    """Sequences that are generated together, each of up to `KV_TOKENS` tokens."""
    num_bytes: int | None = None
    """Memory for all of them, where it is limited."""
    share: float = 0.0
    """Share of the memory for experts and KV caches, in place of both; then a plan divides it."""

    def count_bytes(self, config: PreTrainedConfig, dtype: torch.dtype) -> int:
        """Bytes for a model's KV caches, without those of `share`."""
        if self.num_bytes is not None or self.share:
            return self.num_bytes or 0
        num_tokens = min(KV_TOKENS, context_length(config) or KV_TOKENS)
        return self.num_sequences * estimate_cache_bytes(config, num_tokens, dtype)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Settings of a load, parsed; `runtime.load` describes them."""

    model: ModelConfig
    system: SystemConfig
    predictor: str | Path | Predictor | None = None
    entries: Path | None = None
    budget: Budget | None = None
    """None: computed from free memory, with room for `kv_reserve`."""
    kv_reserve: KVReserve = field(default_factory=KVReserve)
    host_budget: Budget | None = None
    devices: Sequence[torch.device] = (torch.device("cpu"),)
    names_devices: bool = False
    """Whether the user chose several devices, which `expert_parallel` excludes."""
    expert_parallel: bool = False
    store: StoreConfig = field(default_factory=StoreConfig)
    trace_events: Path | None = None
    learned: Path | None = None
    forced_routing: bool = False
    """Whether a log will force the routing: predictors that look at states are left out."""
    draft_model: PreTrainedModel | None = None
    """Drafts tokens for the model, from the same device; in host memory until then."""


def load_model(options: LoadOptions) -> PreTrainedModel:
    """Load a model without its experts, and serve these from the budget.

    `model.moecast` is its `ModelHandle`.

    Raises:
        CheckpointError: no such model, no experts, or damaged files.
        BudgetError: the budget is less than one step needs, or more than there is memory.
        ZooError: the predictor is damaged or was made for another model.
    """
    release_earlier_models()
    # Three times, to release what one part of loading has touched before the next adds to it.
    release_unused()
    config, home = options.model, options.devices[0]
    folder = resolve(config)
    num_processes = count_processes(options)
    available = measure_free_memory(options.devices, num_processes=num_processes)
    check_hybrid(options)
    spread = find_spread_obstacle(options)
    choose_exact(config.exact, home, spread)  # What cannot be is refused before anything is loaded.
    require_predictor(options.system, options.predictor, options.entries)
    if options.store.path is not None:
        # Imported here because of pydantic, as where the store is opened.
        from runtime.store.packed.manifest import read_manifest

        read_manifest(expand_home(options.store.path))
    stripped = load_configured(config, home)
    release_unused()
    plain, layers = stripped.model, stripped.layers
    spec = stripped.spec(folder, config)
    experts = stripped.open_experts(options.store, spec, options.devices)
    if options.system.hybrid and not all(runs_our_loop(layer.experts) for layer in layers):
        raise PlanError(
            f"system.hybrid=true: {type(plain).__name__} computes its experts with other code, "
            "on one device; leave system.hybrid=false"
        )
    keep_decoded(max_decoded_bytes(experts))
    apply_decode_threads(plain, config.decode_threads, expert_bytes=max_slot_bytes(experts))
    obstacle = spread or find_model_obstacle(plain) or find_store_obstacle(experts.layouts)
    exact = choose_exact(config.exact, home, obstacle)
    if note := describe_formats(experts.layouts):
        log.info("%s: %s", options.store.path or folder, note)
    part = None
    if options.expert_parallel:
        # Imported here because device meshes take memory, which one process does not need.
        from runtime.hf import ranks

        part = ranks.find_own_part(layers, experts, has_devices=options.names_devices)
    budget, auto = options.budget, None
    if budget is None:
        auto = choose_auto_budget(options, stripped, experts, spec, available, part=part)
        budget = auto.budget
        log.info("%s", auto.describe())
    predictors = load_system_predictors(
        options.system,
        spec,
        config,
        chosen=options.predictor,
        entries=options.entries,
        makers={"skip": partial(build_skip_predictor, layers)},
        forced_routing=options.forced_routing,
    )
    forecast, learned = predictors.forecast, None
    if options.learned is not None and forecast is not None:
        learned = LearnedStore(options.learned, model=config.name)
        forecast = learned.restore(forecast)
    engine = build_engine(
        experts,
        spec,
        EngineOptions(
            system=options.system,
            predictor=forecast,
            learned=learned,
            drift=build_drift_monitor(forecast, config),
            reuse_predictor=predictors.reuse,
            timeline=None
            if options.trace_events is None
            else ChromeTraceWriter(options.trace_events),
            part=part,
        ),
        budget=budget,
        host_budget=options.host_budget,
        num_processes=num_processes,
        devices=options.devices,
    )
    driver = engine.driver
    signals = {Signal.ROUTED, *(signal for signal, _ in driver.heard)}
    is_spread = len(set(options.devices)) > 1
    attached: list[LayerExperts | GroupedExperts]
    if part is None:
        attached = [*attach_experts(layers, engine, home=home if is_spread else None)]
        if exact is Exact.GROUPED:
            attached += attach_grouped(layers, engine, engine.arenas[0])
            if accelerator := open_accelerator(home):
                engine.look_up_on(accelerator)
    else:
        attached = [*ranks.attach_own_experts(layers, engine, part, home)]
    plain.moecast = ModelHandle(
        config=config,
        spec=spec,
        folder=folder,
        layers=layers,
        engine=engine,
        probes=Probes(
            plain, signals, engine, layers=layers, heard=driver.heard, listens=engine.listens
        ),
        experts=attached,
        exact=exact,
        auto_budget=auto,
    )
    explain_out_of_memory(plain)
    plain.close = plain.moecast.close
    guard_model(plain, layers)
    if exact is Exact.SHARED:
        processes = "several processes share the experts" if options.expert_parallel else None
        plain.moecast.block_heights = choose_heights(plain, processes)
        if not plain.moecast.block_heights:
            plain.moecast.exact = Exact.EAGER
    release_unused()
    freeze_while_loaded()
    return plain


def build_drift_monitor(predictor: Predictor | None, model: ModelConfig) -> DriftMonitor | None:
    """Return what compares a predictor with its card; None for one without a card."""
    if predictor is None or predictor.card is None:
        return None
    prompts = f"{describe_choice(model)} data=jsonl data.path=FILE"
    return DriftMonitor(
        predictor.card,
        top_k=predictor.spec.top_k,
        score_command=f"moecast zoo score {shlex.quote(predictor.card.entry)} {prompts}",
        train_command=f"moecast train {prompts}",
    )


def find_spread_obstacle(options: LoadOptions) -> str | None:
    """Return why experts in several places cannot be grouped; None if they are in one."""
    if options.expert_parallel:
        return "several processes share the experts"
    if len(options.devices) > 1:
        return "the experts are on several devices, and one launch needs them on one"
    if options.system.hybrid:
        return "system.hybrid=true computes some experts in host memory"
    return None


def check_hybrid(options: LoadOptions) -> None:
    """Raise PlanError if missed experts are to be computed in host memory and cannot be."""
    if not options.system.hybrid:
        return
    if options.expert_parallel or len(options.devices) > 1:
        raise PlanError(
            "system.hybrid=true: missed experts are computed in host memory for one device only; "
            "leave system.hybrid=false with several"
        )
    if not needs_host_tier(options.devices, options.host_budget):
        raise PlanError(
            "system.hybrid=true: on a CPU every expert is computed in host memory; try it there "
            "with a second tier (host_budget=100%), or leave system.hybrid=false"
        )


def choose_auto_budget(
    options: LoadOptions,
    stripped: StrippedModel,
    store: ExpertStore,
    spec: ModelSpec,
    available: Sequence[int],
    *,
    part: RankPart | None = None,
) -> AutoBudget:
    """Return the budget that `available` bytes of free memory allow.

    Raises:
        BudgetError: they do not hold what one step needs.
    """
    has_host = needs_host_tier(options.devices, options.host_budget)
    needs, host = size_tiers(store, spec, has_host=has_host, part=part)
    model, reserve = stripped.model, options.kv_reserve
    free = FreeMemory(
        devices=options.devices,
        available=available,
        weights=count_weight_bytes(model),
        kv_caches=reserve.count_bytes(model.config, model.dtype),
        host_tier=options.host_budget.resolve(total_bytes=host.total_bytes)
        if options.host_budget is not None and options.devices[0].type == "cpu"
        else 0,
        draft=count_draft_bytes(options.draft_model, options.devices[0]),
    )
    return choose_budget(needs, free, share=1 - reserve.share)


def count_draft_bytes(draft_model: PreTrainedModel | None, home: torch.device) -> int:
    """Count the memory that a loaded draft model will take: a KV cache, and its weights on a GPU.

    It has one cache: in a server, only an answer that is computed alone has drafts.
    """
    if draft_model is None:
        return 0
    weights = count_weight_bytes(draft_model) if is_accelerator(home) else 0
    return weights + KVReserve().count_bytes(draft_model.config, draft_model.dtype)


def count_processes(options: LoadOptions) -> int:
    """Return the processes on this machine that load a share of the experts each."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if options.expert_parallel else 1


def load_served(
    config: ServedConfig,
    *,
    budget: Budget | str | int,
    kv_reserve: KVReserve | None = None,
    forced_routing: bool = False,
    draft_model: PreTrainedModel | None = None,
    must_generate: bool = True,
) -> PreTrainedModel:
    """Load the model of a command; raises as `load_model`, or if it generates nothing but must."""
    if must_generate:
        check_generates(find_model_class(read_config(resolve(config.model)))[0])
    devices = choose_devices(config.devices)
    return load_model(
        LoadOptions(
            model=config.model,
            system=config.system,
            predictor=config.predictor,
            budget=parse_budget(budget),
            kv_reserve=kv_reserve or KVReserve(),
            host_budget=None
            if config.host_budget is None
            else Budget.parse(config.host_budget, option="host_budget"),
            devices=devices or [choose_device(config.device)],
            names_devices=bool(devices),
            store=config.store,
            trace_events=config.trace_events,
            learned=config.learned,
            forced_routing=forced_routing,
            draft_model=draft_model,
        )
    )


def parse_budget(budget: Budget | str | float) -> Budget | None:
    """Return a budget as `Budget.parse`, None for `auto`.

    Raises:
        BudgetError: none of the allowed forms.
    """
    if isinstance(budget, str) and budget.strip() == AUTO:
        return None
    try:
        return Budget.parse(budget)
    except BudgetError as error:
        raise BudgetError(f"{error}, or {AUTO}") from None
