"""`runtime.load`: an ordinary Transformers model whose experts live in an arena of fixed size."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from predictors.base import Predictor, Signal
from runtime.config import REFERENCE_MODEL, ModelConfig, ServedConfig, StoreConfig, SystemConfig
from runtime.engine.assembly import EngineMemory, EngineOptions, build_engine
from runtime.engine.forecasters import load_reuse_predictor, load_system_predictor
from runtime.engine.handle import ModelHandle
from runtime.engine.memory import release_unused
from runtime.engine.timeline import ChromeTraceWriter
from runtime.errors import CheckpointError
from runtime.hf.layers import attach_experts, build_skip_predictor
from runtime.hf.loading import load_stripped
from runtime.hf.probes import Probes
from runtime.hf.strip import guard_model
from runtime.policy.budget import Budget
from runtime.store.base import ExpertStore
from runtime.store.model_source import resolve


def resolve_model_config(model: str | Path | ModelConfig, dtype: str | None) -> ModelConfig:
    if isinstance(model, ModelConfig):
        config = model
    elif str(model) == REFERENCE_MODEL:
        config = ModelConfig(dtype="float32")
    else:
        name = str(model)
        config = ModelConfig(name=Path(name).name, id=name)
    if dtype is not None:
        config = ModelConfig(**{**vars(config), "dtype": dtype})
    return config


def load(
    model: str | Path | ModelConfig = REFERENCE_MODEL,
    *,
    predictor: str | Path | Predictor | None = None,
    budget: Budget | str | int = "50%",
    host_budget: Budget | str | int | None = None,
    system: SystemConfig | None = None,
    dtype: str | None = None,
    device: str | torch.device = "auto",
    devices: str | Sequence[str | torch.device] = (),
    expert_parallel: bool = False,
    store: StoreConfig | str | Path | None = None,
    trace_events: str | Path | None = None,
    entries: Path | None = None,
) -> PreTrainedModel:
    """Loads a Mixture-of-Experts model without its experts and serves these from `budget`.

    The result is the model's own class: `generate`, `forward` and the rest work as ever and give
    bitwise what `experts_implementation="eager"` gives. `model.moecast` is its `ModelHandle`.

    Args:
        model: bundled name, local folder, Hub id, or a configuration.
        predictor: kind, zoo entry, folder of one, or a predictor; None: the one that the system
            names, if any.
        budget: memory for experts where they are computed: bytes, a size ("4GiB") or a share of
            all experts' bytes ("50%").
        host_budget: host memory for experts below a device; by default all experts, if memory is
            free. On the CPU: a second tier below `budget`, by default none.
        system: eviction and prefetching; `promoe` by default.
        dtype: overrides the checkpoint's own.
        device: device of the model; "auto" is a GPU if there is one.
        devices: several, such as "cuda:0,cuda:1": experts are distributed over them and computed
            where they are, all else on the first. Budgets are for all of them together.
        expert_parallel: this is one of the processes of `torch.distributed`, which all load the
            model and are called alike. Each serves its share of the experts from its own `budget`
            (`runtime.hf.ranks`). Sums differ from `eager`'s in their order.
        store: folder of a packed store, or settings; by default the checkpoint is read in place.
        trace_events: file for a Chrome trace; None: no trace.
        entries: folder of entries by kind, searched before the zoo.

    Raises:
        CheckpointError: no such model, no experts, or damaged files.
        BudgetError: the budget is less than one step needs.
        ZooError: the predictor is damaged or was made for another model.
    """
    # Three times, to release what one part of loading has touched before the next adds to it.
    release_unused()
    config = resolve_model_config(model, dtype)
    folder = resolve(config)
    chosen_devices = choose_devices(devices) or [choose_device(device)]
    home = chosen_devices[0]
    memory = EngineMemory(
        budget=Budget.parse(budget),
        host_budget=None
        if host_budget is None
        else Budget.parse(host_budget, option="host_budget"),
        devices=chosen_devices,
    )
    stripped = load_stripped(folder, config.dtype, home)
    release_unused()
    plain, layers = stripped.model, stripped.layers
    if not isinstance(store, StoreConfig):
        store = StoreConfig(path=None if store is None else Path(store))
    experts: ExpertStore = stripped.open_store(page_cache=store.page_cache)
    spec = stripped.spec(folder, config)
    if store.path is not None:
        # Imported here because pydantic takes 5 MiB, which nothing else needs.
        from runtime.store.packed.store import open_store

        experts.close()
        experts = open_store(store.path, spec, checkpoint=folder, page_cache=store.page_cache)
    system = system or SystemConfig()
    part = None
    if expert_parallel:
        # Imported here because device meshes take memory, which one process does not need.
        from runtime.hf import ranks

        part = ranks.find_own_part(layers, experts, has_devices=bool(devices))
    if not isinstance(predictor, Predictor):
        predictor = load_system_predictor(
            system,
            spec,
            name=config.name,
            chosen=predictor,
            entries=entries,
            makers={"skip": partial(build_skip_predictor, layers)},
        )
    options = EngineOptions(
        system=system,
        predictor=predictor,
        reuse_predictor=load_reuse_predictor(system, spec, name=config.name, entries=entries),
        timeline=None if trace_events is None else ChromeTraceWriter(trace_events),
        part=part,
    )
    engine = build_engine(experts, spec, memory, options)
    signals = frozenset({Signal.ROUTED}) | engine.driver.all_signals
    is_spread = len(set(chosen_devices)) > 1
    if part is None:
        attached = attach_experts(layers, engine, home=home if is_spread else None)
    else:
        attached = ranks.attach_own_experts(layers, engine, part, home)
    plain.moecast = ModelHandle(
        spec=spec,
        folder=folder,
        layers=layers,
        engine=engine,
        probes=Probes(plain, signals, engine, layers=layers),
        experts=attached,
    )
    plain.close = plain.moecast.close
    guard_model(plain, layers)
    release_unused()
    return plain


def load_served(config: ServedConfig, *, budget: Budget | str | int) -> PreTrainedModel:
    return load(
        config.model,
        predictor=config.predictor,
        budget=budget,
        host_budget=config.host_budget,
        system=config.system,
        device=config.device,
        devices=config.devices,
        store=config.store,
        trace_events=config.trace_events,
    )


def choose_device(device: str | torch.device) -> torch.device:
    """Return a device by name.

    Raises:
        CheckpointError: no such device, or none that this torch can use.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise CheckpointError(f"device={device}: write auto, cpu, cuda or cuda:1") from error
    if chosen.type not in ("cpu", "cuda"):
        raise CheckpointError(f"device={device}: experts are served on cpu and cuda only")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise CheckpointError(
            f"device={device}: this torch sees no CUDA device; use device=cpu, or install a CUDA "
            "build of torch"
        )
    return chosen


def primary_device(config: ServedConfig) -> torch.device:
    """Return the device of all weights but experts: plain Transformers is compared there."""
    return choose_device(config.devices[0] if config.devices else config.device)


def choose_devices(devices: str | Sequence[str | torch.device]) -> list[torch.device]:
    """Return devices by name, none for an empty list; `cpu,cpu` are two with an arena each.

    Raises:
        CheckpointError: one is not available, or they are of different kinds.
    """
    named = devices.split(",") if isinstance(devices, str) and devices else devices
    chosen = [
        choose_device(device.strip() if isinstance(device, str) else device) for device in named
    ]
    if len({device.type for device in chosen}) > 1:
        raise CheckpointError(
            f"devices={','.join(map(str, chosen))}: an expert's output would depend on where it is "
            "computed; name devices of one kind, such as cuda:0,cuda:1"
        )
    # `cuda` and `cuda:0` are the same device but not equal.
    return [
        torch.device(device.type, device.index or 0) if device.type == "cuda" else device
        for device in chosen
    ]
