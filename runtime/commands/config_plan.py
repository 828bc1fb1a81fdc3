"""`moecast doctor` for a model whose weights are not here: what it would need, and how fast.

The bound on speed is a roofline (Williams, Waterman and Patterson, 2009): a token takes at least as
long as its experts that are not in memory take to read, and as long as its weights take to come
from memory. Experts count as equally likely, so that hits are the share of experts in memory; real
routing is more local and hits more.
"""

import math
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from predictors.table import Table, TableColumn, percent
from predictors.units import GIB, MIB
from runtime.commands.pack import choose_coding
from runtime.commands.progress import print_line
from runtime.config import DoctorConfig, ModelConfig, Quantise
from runtime.engine.auto_budget import FreeMemory, choose_budget, format_size
from runtime.engine.loading import KV_TOKENS
from runtime.engine.memory import available_memory_bytes
from runtime.errors import BudgetError, PlanError
from runtime.hf.kv import estimate_cache_bytes
from runtime.hf.layers import find_top_k
from runtime.hf.loading import StrippedModel, build_skeleton
from runtime.hf.strip import list_taken_parameters
from runtime.hf.tokens import context_length
from runtime.policy.budget import Budget, SlotRequirements, count_slots
from runtime.profiling.bandwidth import measure_disk_bandwidth, measure_memory_bandwidth
from runtime.profiling.facts import hardware, versions
from runtime.store.base import slot_sizes
from runtime.store.checkpoint import assume_layout
from runtime.store.layout import ExpertLayout, build_packed_layout
from runtime.store.spill import is_in_memory

DTYPE = "bfloat16"
QUANTISED = (Quantise.INT8, Quantise.INT4)
SCRATCH_BYTES = 256 * MIB
"""Enough for some reads of each size that are not in any cache of the disk."""


@dataclass(frozen=True, kw_only=True)
class MachineLimits:
    """This machine: what bounds a model on it."""

    free_memory_bytes: int
    disk_bytes_per_second: float | None
    """None: not measured."""
    memory_bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class ModelCounts:
    """Parameters of a model, and memory that does not depend on the experts' format."""

    parameters: int
    expert_parameters: int
    """Parameters of all experts."""
    active_parameters: int
    """Those that one token is multiplied by; of the input embedding it takes one row."""
    dense_bytes: int
    """Weights that are not experts."""
    read_dense_bytes: int
    """The part of them that each token reads from memory."""
    kv_bytes_per_token: int
    num_layers: int
    """Layers with routed experts."""
    num_experts: int
    top_k: int

    @property
    def experts_per_token(self) -> int:
        return self.num_layers * self.top_k


@dataclass(frozen=True, kw_only=True)
class FormatPlan:
    """A model on this machine, with its experts in one format; bytes, seconds, shares of 1."""

    format: str
    expert_bytes: int
    experts_bytes: int
    total_bytes: int
    """All experts and the other weights."""
    least_budget_bytes: int
    """Memory for the experts of one token in one layer."""
    budget_bytes: int | None
    """The choice of `budget=auto`; None: there is no room, and the figures below are those of
    the least budget."""
    error: str | None
    """The reason why there is no room."""
    hit_rate: float
    """Share of the experts that the budget holds."""
    reads_per_token: float
    """Experts that a token reads from the disk."""
    read_bytes_per_token: float
    disk_seconds: float | None
    memory_seconds: float
    tpot_seconds: float | None
    """The bound: the longer of both."""


def run(config: DoctorConfig, folder: Path) -> dict[str, Any]:
    """Plan from `config.json` in `folder`: nothing of the model's weights is read or allocated.

    Raises:
        CheckpointError: the configuration is damaged, unknown, or of a model without experts.
        PlanError: a draft model is to be counted.
    """
    if config.draft is not None:
        raise PlanError(
            f"draft={config.draft}: it is counted with a model whose weights are here; leave "
            "draft= out"
        )
    free = available_memory_bytes()
    stripped = build_skeleton(folder, dtype=DTYPE)
    model = stripped.model
    top_k = find_top_k(model, stripped.layers)
    kv_bytes = estimate_cache_bytes(model.config, 1, model.dtype)
    counts = count_parameters(stripped, top_k=top_k, kv_bytes_per_token=kv_bytes)
    layouts = lay_out_formats(stripped)
    where = config.run_dir or Path.cwd()
    if not os.access(where, os.W_OK):
        where = Path(tempfile.gettempdir())
    expert_bytes = min(layout.num_bytes for own in layouts.values() for layout in own)
    limits = MachineLimits(
        free_memory_bytes=free,
        disk_bytes_per_second=measure_disk(where, expert_bytes, seed=config.seed),
        memory_bytes_per_second=measure_memory_bandwidth(),
    )
    kv_tokens = min(KV_TOKENS, context_length(model.config) or KV_TOKENS)
    plans = plan_formats(counts, layouts, limits, kv_tokens=kv_tokens)
    report = {
        "versions": versions(),
        "hardware": hardware(where),
        "folder": str(folder),
        "config_only": True,
        "class": type(model).__name__,
        "model": asdict(counts),
        "kv_tokens": kv_tokens,
        "machine": asdict(limits),
        "disk_measured_in": str(where),
        "formats": [asdict(plan) for plan in plans],
    }
    print_plan(config.model, counts, limits, plans, kv_tokens=kv_tokens)
    return report


def lay_out_formats(stripped: StrippedModel) -> Mapping[str, Sequence[ExpertLayout]]:
    """Return the layers' layouts in each format: as a checkpoint in bfloat16 and as packed ones."""
    plain = [assume_layout(list_taken_parameters([layer])) for layer in stripped.layers]
    formats: dict[str, Sequence[ExpertLayout]] = {DTYPE: plain}
    for quantise in QUANTISED:
        coding = choose_coding(quantise)
        formats[quantise.value] = [build_packed_layout(own, coding=coding) for own in plain]
    return formats


def measure_disk(folder: Path, expert_bytes: int, *, seed: int) -> float | None:
    """Measure direct reads of about an expert's size from a scratch file, in bytes per second.

    None where files in the folder are in memory.
    """
    if is_in_memory(folder):
        return None
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".moecast-reads-") as file:
        for _ in range(SCRATCH_BYTES // (16 * MIB)):
            file.write(os.urandom(16 * MIB))
        file.flush()
        os.fsync(file.fileno())
        rows = measure_disk_bandwidth([Path(file.name)], seed=seed)
    fitting = [row for row in rows if row["read_bytes"] <= expert_bytes] or rows[:1]
    return fitting[-1]["direct"]


def count_parameters(
    stripped: StrippedModel, *, top_k: int, kv_bytes_per_token: int
) -> ModelCounts:
    """Count a model's parameters; those on the meta device have no memory to look at.

    The few that some models keep in float32 count in the model's dtype.
    """
    model: Any = stripped.model
    experts = list_taken_parameters(stripped.layers)
    expert_parameters = sum(math.prod(parameter.shape) for parameter in experts)
    dense = [*model.parameters(), *model.buffers()]
    dense_bytes = sum(tensor.nbytes for tensor in dense)
    dense_parameters = sum(parameter.numel() for parameter in model.parameters())
    unread = find_unread_embedding(model)
    unread_numel = 0 if unread is None else unread.numel()
    active = sum(top_k * math.prod(parameter.shape[1:]) for parameter in experts)
    return ModelCounts(
        parameters=expert_parameters + dense_parameters,
        expert_parameters=expert_parameters,
        active_parameters=dense_parameters - unread_numel + active,
        dense_bytes=dense_bytes,
        read_dense_bytes=dense_bytes - (0 if unread is None else unread.nbytes),
        kv_bytes_per_token=kv_bytes_per_token,
        num_layers=len(stripped.layers),
        num_experts=max(parameter.num_experts for parameter in experts),
        top_k=top_k,
    )


def find_unread_embedding(model: Any) -> nn.Parameter | None:
    """Return the input embedding's table; None if the output is computed with it too."""
    table = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    return None if output is not None and output.weight is table else table


def plan_formats(
    counts: ModelCounts,
    layouts: Mapping[str, Sequence[ExpertLayout]],
    limits: MachineLimits,
    *,
    kv_tokens: int,
) -> list[FormatPlan]:
    """Plan each format, given the layouts of its layers.

    Args:
        kv_tokens: tokens for whose KV cache memory is left.
    """
    free = FreeMemory(
        available=[limits.free_memory_bytes],
        weights=counts.dense_bytes,
        kv_caches=kv_tokens * counts.kv_bytes_per_token,
    )
    return [plan_format(name, counts, own, limits, free) for name, own in layouts.items()]


def plan_format(
    name: str,
    counts: ModelCounts,
    layouts: Sequence[ExpertLayout],
    limits: MachineLimits,
    free: FreeMemory,
) -> FormatPlan:
    """Plan one format."""
    sizes = Counter(slot_sizes(layouts))
    experts = {size: num_layers * counts.num_experts for size, num_layers in sizes.items()}
    needs = SlotRequirements(experts=experts, top_k=counts.top_k)
    expert_bytes = needs.total_bytes // needs.num_experts
    budget, error = None, None
    try:
        budget = choose_budget(needs, free).num_bytes
    except BudgetError as no_room:
        error = str(no_room)
    slots = count_slots(Budget(budget or needs.least_bytes), needs)
    hit_rate = slots / needs.num_experts
    reads = (1 - hit_rate) * counts.experts_per_token
    touched = counts.read_dense_bytes + counts.experts_per_token * expert_bytes
    memory_seconds = touched / limits.memory_bytes_per_second
    speed = limits.disk_bytes_per_second
    disk_seconds = None if speed is None else reads * expert_bytes / speed
    return FormatPlan(
        format=name,
        expert_bytes=expert_bytes,
        experts_bytes=needs.total_bytes,
        total_bytes=needs.total_bytes + counts.dense_bytes,
        least_budget_bytes=needs.least_bytes,
        budget_bytes=budget,
        error=error,
        hit_rate=hit_rate,
        reads_per_token=reads,
        read_bytes_per_token=reads * expert_bytes,
        disk_seconds=disk_seconds,
        memory_seconds=memory_seconds,
        tpot_seconds=None if disk_seconds is None else max(disk_seconds, memory_seconds),
    )


def print_plan(
    chosen: ModelConfig,
    counts: ModelCounts,
    limits: MachineLimits,
    plans: Sequence[FormatPlan],
    *,
    kv_tokens: int,
) -> None:
    """Print the model, the machine, and a row for each format."""
    speed = limits.disk_bytes_per_second
    disk = "not measured" if speed is None else f"{speed / MIB:,.0f} MiB/s"
    facts = {
        "parameters": f"{format_count(counts.parameters)}, of which a token uses "
        f"{format_count(counts.active_parameters)}",
        "experts": f"{counts.num_layers} layers of {counts.num_experts}, {counts.top_k} per token, "
        f"together {format_count(counts.expert_parameters)} parameters",
        "other weights": f"{format_size(counts.dense_bytes)} in {DTYPE}",
        "KV cache": f"{counts.kv_bytes_per_token:,} bytes per token in {DTYPE}, "
        f"{format_size(kv_tokens * counts.kv_bytes_per_token)} for {kv_tokens} tokens",
        "memory": f"{format_size(limits.free_memory_bytes)} free, "
        f"{limits.memory_bytes_per_second / GIB:.1f} GiB/s",
        "disk": f"{disk} in direct reads of an expert's size",
    }
    console = Console()
    Table.facts(facts, f"{chosen.name} from its configuration, without weights").print(console)
    columns = [
        TableColumn("experts in", "format"),
        TableColumn("one", "expert_bytes", format_size),
        TableColumn("all", "experts_bytes", format_size),
        TableColumn("with others", "total_bytes", format_size),
        TableColumn("least budget", "least_budget_bytes", format_size),
        TableColumn("budget", "budget_bytes", format_size),
        TableColumn("hits", "hit_rate", percent),
        TableColumn("read/token", "read_bytes_per_token", format_size),
        TableColumn("least TPOT", "tpot_seconds", lambda seconds: f"{1000 * seconds:,.0f} ms"),
    ]
    Table(columns=columns, rows=plans, title="experts by format").print(console)
    print_line(
        "budget: what budget=auto takes here. hits: the share of the experts in memory, as if all "
        "were equally likely; real routing is more local and reads less. least TPOT: bytes read "
        "divided by the disk's bandwidth, or bytes of weights that a token uses divided by the "
        "memory's, whichever is longer"
    )
    if failed := next((plan for plan in plans if plan.error is not None), None):
        print_line(
            f"without a budget here, figures are those of the least budget; {failed.format}: "
            f"{failed.error}"
        )


def format_count(number: int) -> str:
    """Write a number of parameters in billions or millions."""
    return f"{number / 1e9:,.1f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"
