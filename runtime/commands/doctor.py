"""`moecast doctor`: this machine, this model, which budget."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from predictors.spec import ModelSpec
from predictors.table import Table, TableColumn, percent, size
from predictors.units import MIB
from runtime.commands import config_plan
from runtime.commands.progress import print_line, progress
from runtime.config import DoctorConfig
from runtime.engine.assembly import size_tiers
from runtime.engine.auto_budget import format_size, measure_free_memory
from runtime.engine.devices import choose_device
from runtime.engine.forecasters import load_system_predictors
from runtime.engine.loading import LoadOptions, choose_auto_budget
from runtime.engine.memory import available_memory_bytes
from runtime.errors import BudgetError
from runtime.generation.drafting import load_draft_model
from runtime.hf.decode_step import apply_decode_threads
from runtime.hf.layers import attach_experts, build_skip_predictor
from runtime.hf.loading import StrippedModel, count_weight_bytes, load_configured
from runtime.policy.budget import count_bytes
from runtime.policy.placement import SplitCosts, choose_host_experts
from runtime.presets import DEFAULT_SYSTEM, describe_choice, load_system
from runtime.profiling.bandwidth import (
    measure_disk_bandwidth,
    measure_link_bandwidth,
    measure_memory_bandwidth,
)
from runtime.profiling.facts import hardware, versions
from runtime.profiling.local import measure_stripped
from runtime.sim.hardware import MeasuredHardware
from runtime.store.base import ExpertStore, OnDemandReader, max_slot_bytes, name_format
from runtime.store.model_check import list_weight_files
from runtime.store.model_source import find_config_folder, resolve
from runtime.tools.doctor import check_files, record_routing, sweep_budgets
from runtime.tools.verify.reference import token_prompts

STAGES = 4
PROMPTS = ["The heart pumps blood", "It was a dark and stormy night", "Return a new list"]


def run(config: DoctorConfig) -> dict[str, Any]:
    """Examine the machine and the model."""
    if (without_weights := find_config_folder(config)) is not None:
        return config_plan.run(config, without_weights)
    folder = resolve(config.model)
    options = LoadOptions(
        model=config.model,
        system=load_system(DEFAULT_SYSTEM),
        devices=[choose_device("auto")],
        draft_model=load_draft_model(config.draft, config.model),
    )
    # Before the model is loaded, as `budget=auto` measures it.
    free = measure_free_memory(options.devices)
    with progress(Console(stderr=True), "examining", total=STAGES) as advance:
        report: dict[str, Any] = {
            "versions": versions(),
            "hardware": hardware(folder),
            "folder": str(folder),
            "files": check_files(folder, digests=config.digests),
        }
        advance(1)
        report["bandwidth"] = {
            "disk": measure_disk_bandwidth(list_weight_files(folder), seed=config.seed),
            "memory_bytes_per_second": measure_memory_bandwidth(),
            "links_bytes_per_second": measure_link_bandwidth(),
        }
        advance(1)
        stripped = load_configured(config.model)
        model, store = stripped.model, stripped.open_store()
        spec = stripped.spec(folder, config.model)
        apply_decode_threads(model, config.model.decode_threads, expert_bytes=max_slot_bytes(store))
        report["model"] = describe_model_sizes(model, spec, store)
        measured = measure_stripped(stripped, store, spec)
        kept = available_memory_bytes() // 2
        attach_experts(stripped.layers, OnDemandReader(store, keep_bytes=kept))
        report["measured"] = asdict(measured)
        report["hybrid"] = estimate_hybrid(
            report["bandwidth"]["links_bytes_per_second"], report["model"], measured
        )
        advance(1)
        report |= sweep(config, folder, stripped, store, spec, measured, options.draft_model)
        report |= suggest_budget(options, stripped, store, spec, free)
        store.close()
        advance(1)
    print_report(config.model.name, report)
    if model.can_generate() and report["suggested_budget_bytes"] is not None:
        print_line(f"next: moecast generate {describe_choice(config.model)}")
    return report


def suggest_budget(
    options: LoadOptions,
    stripped: StrippedModel,
    store: ExpertStore,
    spec: ModelSpec,
    free: Sequence[int],
) -> dict[str, Any]:
    """Return the budget that `budget=auto` chooses with so much free memory, and its basis."""
    try:
        auto = choose_auto_budget(options, stripped, store, spec, free)
    except BudgetError as error:
        return {"suggested_budget_bytes": None, "suggestion_rests_on": str(error)}
    return {"suggested_budget_bytes": auto.num_bytes, "suggestion_rests_on": auto.describe()}


def estimate_hybrid(
    links: Sequence[float], model: Mapping[str, Any], measured: MeasuredHardware
) -> list[dict[str, Any]]:
    """Estimate `system.hybrid` by accelerator: a layer of one token, all of it in host memory.

    Copies and products are those just measured, each alone; both at once share host memory. The
    time of a copied expert is that of its copy.

    Args:
        links: bytes per second to each accelerator.
        model: what `describe_model_sizes` returns.
    """
    missed, estimates = dict.fromkeys(range(model["top_k"]), 1), []
    for rate in links:
        costs = SplitCosts(
            copy_seconds=model["expert_bytes"] / rate, host_seconds=measured.expert_seconds
        )
        on_host, seconds = choose_host_experts(missed, costs)
        estimates.append(
            {
                "experts_on_host": len(on_host),
                "layer_seconds": seconds,
                "layer_seconds_without": costs.copy_side(len(missed)),
            }
        )
    return estimates


def describe_model_sizes(
    model: PreTrainedModel, spec: ModelSpec, store: ExpertStore
) -> dict[str, Any]:
    """Describe the model's sizes; bytes are those in memory, an expert's the mean of all."""
    needs, _ = size_tiers(store, spec, has_host=False)
    experts_bytes = count_bytes(needs.experts)
    return {
        **spec.as_dict(),
        "class": type(model).__name__,
        "expert_bytes": experts_bytes // needs.num_experts,
        "expert_sizes": sorted(needs.experts),
        "expert_format": " and ".join(sorted({*map(name_format, store.layouts)})),
        "experts_bytes": experts_bytes,
        "non_expert_bytes": count_weight_bytes(model),
        "scratch_bytes": needs.scratch_bytes,
    }


def sweep(
    config: DoctorConfig,
    folder: Path,
    stripped: StrippedModel,
    store: ExpertStore,
    spec: ModelSpec,
    measured: Any,
    draft_model: PreTrainedModel | None,
) -> dict[str, Any]:
    """Sweep the budgets; also describes what the estimates are based on."""
    model = stripped.model
    if model.config.is_encoder_decoder or not model.can_generate():
        reason = "only the routing of decoders is replayed; measure with `bench`"
        return {"outlook": None, "outlook_rests_on": reason}
    prompts, what = token_prompts(folder, PROMPTS, seed=config.seed)
    steps = record_routing(model, prompts, seconds=config.seconds)
    decodes = sum(len(step.tokens_T) == 1 for step in steps)
    predictors = load_system_predictors(
        load_system(DEFAULT_SYSTEM),
        spec,
        config.model,
        chosen=config.predictor,
        makers={"skip": partial(build_skip_predictor, stripped.layers)},
    )
    used = [one.kind for one in (predictors.forecast, predictors.reuse) if one is not None]
    rows = sweep_budgets(
        steps,
        spec=spec,
        hardware=measured,
        predictors=predictors,
        budgets=config.budget,
        needs=size_tiers(store, spec, has_host=False)[0],
        resident_bytes=sum(count_weight_bytes(one) for one in (model, draft_model) if one),
    )
    return {
        "outlook": rows,
        "outlook_rests_on": (
            f"this model's routing of {len(steps) - decodes} prompts ({what}) and {decodes} tokens "
            "that it generated now, replayed from an empty arena with the reads and the "
            f"computation just measured on the CPU; predictors: {', '.join(used) or 'none'}"
        ),
    }


def print_report(name: str, report: dict[str, Any]) -> None:
    """Print machine, model, bandwidths, the budget sweep and a suggested budget."""
    console = Console()
    make_facts_table(name, report).print(console)
    print_bandwidths(console, report["bandwidth"])
    for device, estimate in enumerate(report["hybrid"]):
        print_line(
            f"system.hybrid=true, GPU {device}: of a token's {report['model']['top_k']} experts in "
            f"host memory, {estimate['experts_on_host']} are computed there; a layer waits "
            f"{1000 * estimate['layer_seconds']:.2f} in place of "
            f"{1000 * estimate['layer_seconds_without']:.2f} ms, if copies and products do not "
            "slow each other down"
        )
    if report["outlook"] is None:
        print_line(f"no estimates: {report['outlook_rests_on']}")
    else:
        make_budget_table(report["outlook"]).print(console)
        print_line(f"estimates are based on {report['outlook_rests_on']}")
    print_line(report["suggestion_rests_on"])


def make_facts_table(name: str, report: dict[str, Any]) -> Table:
    """Make the table of versions, hardware, files and the model."""
    hardware, model, files = report["hardware"], report["model"], report["files"]
    gpus = [f"{gpu['name']}, {format_size(gpu['memory_bytes'])}" for gpu in hardware["gpus"]]
    kernels = hardware["network_kernels"]
    sizes = {f"{model['expert_sizes'][end] / MIB:.2f}": None for end in (0, -1)}
    rows = {
        "versions": ", ".join(f"{k} {v or 'not installed'}" for k, v in report["versions"].items()),
        "processor": f"{hardware['processor']}, {hardware['cores']} cores",
        "predictors": "onnxruntime; faster where a C compiler was there at installation"
        if kernels is None
        else f"compiled kernels ({kernels})",
        "policy core": "compiled" if hardware["compiled_core"] else "Python files",
        "memory": f"{format_size(hardware['memory_bytes'])}, "
        f"{format_size(hardware['available_memory_bytes'])} available",
        "GPUs": "; ".join(gpus) or "none",
        "disk": f"{format_size(hardware['disk_free_bytes'])} free of "
        f"{format_size(hardware['disk_bytes'])}",
        "files": f"{files['files']} in {report['folder']}, {format_size(files['bytes'])}, "
        f"{files['tensors']} tensors, complete; digests: {files['digests']}",
        "experts": f"{model['num_layers']} layers of {model['num_experts']}, "
        f"{model['top_k']} per token, {' to '.join(sizes)} MiB each in "
        f"{model['expert_format']}, together {format_size(model['experts_bytes'])}",
        "other weights": format_size(model["non_expert_bytes"]),
    }
    return Table.facts(rows, f"{name} on this machine")


def print_bandwidths(console: Console, bandwidth: dict[str, Any]) -> None:
    """Print the table of disk bandwidth by read size, then memory and links."""
    links = bandwidth["links_bytes_per_second"]
    rates = {"memory (a copy, read and written)": bandwidth["memory_bytes_per_second"]}
    rates |= {f"to GPU {i}": rate for i, rate in enumerate(links)}
    columns = [
        TableColumn("read size", "read_bytes", size),
        TableColumn("direct (as the runtime)", "direct", write_bandwidth),
        TableColumn("cold page cache", "cold", write_bandwidth),
        TableColumn("page cache", "cached", write_bandwidth),
    ]
    Table(columns=columns, rows=bandwidth["disk"], title="reads of the model's files").print(
        console
    )
    print_line("; ".join(f"{name} {write_bandwidth(r)}" for name, r in rates.items()))
    console.print()


def make_budget_table(rows: list[dict[str, Any]]) -> Table:
    """Make the table of memory and speed at each budget."""
    columns = [
        TableColumn("budget"),
        TableColumn("system"),
        TableColumn("TPOT", "tpot_seconds", lambda seconds: f"{1000 * seconds:.1f} ms"),
        TableColumn("hits", "hit_rate", percent),
        TableColumn("stalled", "stall_share", percent),
        TableColumn("experts", "bytes", format_size),
        TableColumn("process", "process_bytes", format_size),
    ]
    lines = [
        {**row, **figures, "system": name}
        for row in rows
        for name, figures in row.get("systems", {"too small": {}}).items()
    ]
    title = "estimates for each budget (simulated)"
    return Table(columns=columns, rows=lines, title=title, left=2)


def write_bandwidth(bytes_per_second: float) -> str:
    return f"{bytes_per_second / MIB:,.0f} MiB/s"
