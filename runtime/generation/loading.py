"""`runtime.load`: loads a model and gives it the methods of this package."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from predictors.base import Predictor
from predictors.errors import MoecastError
from runtime.config import (
    AUTO,
    DTYPES,
    REFERENCE_MODEL,
    DecodeKernels,
    ModelConfig,
    StoreConfig,
    SystemConfig,
)
from runtime.engine.devices import choose_device, choose_devices
from runtime.engine.loading import LoadOptions, load_model, parse_budget
from runtime.errors import CheckpointError
from runtime.policy.budget import Budget
from runtime.presets import DEFAULT_SYSTEM, find_model, load_system

if TYPE_CHECKING:
    from runtime.generation.batch.result_journal import BatchResult


def load(
    model: str | Path | ModelConfig = REFERENCE_MODEL,
    *,
    local_only: bool | None = None,
    revision: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "auto",
    devices: str | Sequence[str | torch.device] = (),
    budget: str | float | Budget = AUTO,
    host_budget: str | float | Budget | None = None,
    system: str | SystemConfig = DEFAULT_SYSTEM,
    predictor: str | Path | Predictor | None = None,
    entries: str | Path | None = None,
    store: str | Path | StoreConfig | None = None,
    expert_parallel: bool = False,
    trace_events: str | Path | None = None,
    decode_kernels: str | None = None,
    decode_threads: int | None = None,
) -> PreTrainedModel:
    """Loads a Mixture-of-Experts model without its experts and serves these from `budget`.

    The result has the model's own Transformers class: `generate`, `forward` and the rest work as
    usual and give bitwise what `experts_implementation="eager"` gives (on a GPU by default what
    `"grouped_mm"` gives: `model.exact`) with the same kernels and threads. In addition it has
    `generate_many(prompts)`, `moecast` (its `ModelHandle`, with `stats()`) and `close()`.

    Args:
        model: A preset of `configs/model` (`qwen1.5-moe`), a folder in the Hub's layout, a GGUF
            file, or a Hub id (`Qwen/Qwen3-30B-A3B`). By default the small model that ships with the
            package.
        local_only: False downloads the model from the Hub if it is not on this machine. By default
            nothing is downloaded.
        revision: Commit, tag or branch on the Hub. By default the preset's, else `main`.
        dtype: Dtype of weights and activations: `torch.bfloat16`, `torch.float16`,
            `torch.float32`, or their names; `"auto"` is the checkpoint's own. By default the
            preset's, else the checkpoint's own. It cannot be changed after loading.
        device: Device of the model; `"auto"` is a GPU if there is one, else the CPU.
        devices: Several devices, such as `"cuda:0,cuda:1"`, in place of `device`: experts are
            distributed over them and computed where they are, all else on the first. Budgets are
            for all of them together.
        budget: Memory for experts where they are computed: `"auto"` (from free memory, all experts
            if they fit), a size (`"4GiB"`), a share of all experts (`"50%"` or `0.5`), or a whole
            number of bytes.
        host_budget: Host memory for experts below a GPU; by default all experts, if memory is
            free. On the CPU it adds a second tier below `budget`, by default none.
        system: Which experts are fetched and evicted: a name of `configs/system` (`"promoe"`), or a
            configuration. Without trained predictors for this model, the default `moecast`
            forecasts with the model's own routers and evicts by usage counts, and logs that.
        predictor: Kind, zoo entry, folder of one, or a predictor, in place of the system's.
        entries: Folder of entries by kind, as training writes them, searched before the zoo.
        store: Folder of a packed store, or settings; by default the checkpoint is read in place.
        expert_parallel: This is one of the processes of `torch.distributed`, which all load the
            model and are called alike. Each serves its share of the experts from its own `budget`.
            Sums differ from those of one process in their order.
        trace_events: File for a Chrome trace of all computations and transfers; None: no trace.
        decode_kernels: `"library"` computes steps of one token in bfloat16 and float16 on a CPU
            as Transformers does; by default they take faster kernels, whose last bits differ.
        decode_threads: Threads of such steps; by default one, or all but one where that is faster.

    Returns:
        The model, in evaluation mode. Close it, or use `with model.moecast:`, to end its threads.

    Raises:
        CheckpointError: No such model or device, no experts, or damaged files.
        BudgetError: The budget is malformed, or less than one step needs.
        ZooError: A predictor that was named is missing, damaged or made for another model.
        MoecastError: Base of all of these; the message names what is allowed.

    Example:
        >>> from moecast import load
        >>> model = load("Qwen/Qwen3-30B-A3B", local_only=False, budget=0.5)
        >>> with model.moecast:
        ...     output = model.generate(**inputs, max_new_tokens=64)
        ...     print(model.moecast.stats()["hit_rate"])
    """
    chosen_devices = choose_devices(devices)
    if not isinstance(store, StoreConfig):
        store = StoreConfig(path=None if store is None else Path(store))
    options = LoadOptions(
        model=configure_model(
            model,
            local_only=local_only,
            revision=revision,
            dtype=dtype,
            decode_kernels=decode_kernels,
            decode_threads=decode_threads,
        ),
        system=choose_system(system),
        predictor=predictor,
        entries=None if entries is None else Path(entries),
        budget=parse_budget(budget),
        host_budget=None
        if host_budget is None
        else Budget.parse(host_budget, option="host_budget"),
        devices=chosen_devices or [choose_device(device)],
        names_devices=bool(chosen_devices),
        expert_parallel=expert_parallel,
        store=store,
        trace_events=None if trace_events is None else Path(trace_events),
    )
    loaded = load_model(options)

    def generate_many(prompts: Iterable[Any], **settings: Any) -> "list[BatchResult]":
        # Imported here because serving one prompt at a time needs none of it.
        from runtime.generation.batch.generate_many import generate_many

        return generate_many(loaded, prompts, **settings)

    loaded.generate_many = generate_many
    return loaded


def configure_model(
    model: str | Path | ModelConfig,
    *,
    local_only: bool | None = None,
    revision: str | None = None,
    dtype: str | torch.dtype | None = None,
    decode_kernels: str | None = None,
    decode_threads: int | None = None,
) -> ModelConfig:
    """Return a model's configuration; what is None stays as the preset or configuration has it.

    Raises:
        CheckpointError: no such model, dtype or kernels; the message has the choices.
    """
    if not isinstance(model, (str, Path, ModelConfig)):
        raise CheckpointError(
            f"model={model!r}: give the name of a preset, a folder or a Hub id ORG/NAME"
        )
    config = model if isinstance(model, ModelConfig) else find_model(model)
    given = {
        "local_only": local_only,
        "revision": revision,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "decode_kernels": decode_kernels,
        "decode_threads": decode_threads,
    }
    changes: dict[str, Any] = {name: one for name, one in given.items() if one is not None}
    for name, allowed in (("dtype", DTYPES), ("decode_kernels", list(DecodeKernels))):
        if changes.get(name, allowed[0]) not in allowed:
            raise CheckpointError(f"{name}={given[name]}: allowed are {', '.join(allowed)}")
    if decode_kernels is not None:
        changes["decode_kernels"] = DecodeKernels(decode_kernels)
    return replace(config, **changes)


def choose_system(system: str | SystemConfig) -> SystemConfig:
    """Return a system by name.

    Raises:
        MoecastError: no such system; the message has the choices.
    """
    if isinstance(system, SystemConfig):
        return system
    if not isinstance(system, str):
        raise MoecastError(
            f"system={system!r}: give a name such as {DEFAULT_SYSTEM!r}, or a SystemConfig"
        )
    return load_system(system)
