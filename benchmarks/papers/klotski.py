"""Klotski, table 3 and figure 13: throughput of its steps, and accuracy of its prefetching.

Groups of requests with the paper's lengths are drawn from the held-out ones
(`benchmarks.klotski.workload`).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.klotski.environments import ENVIRONMENTS
from benchmarks.klotski.workload import NEW_TOKENS, PROMPT_TOKENS
from benchmarks.papers.cells import CellFigures, DrawnGroups, ReplayTable
from benchmarks.papers.claims import Comparison
from benchmarks.papers.paper_context import experts_bytes, load_hardware, load_shape, load_system
from benchmarks.papers.published import find_published
from runtime.commands.pack import choose_coding
from runtime.config import HardwareConfig, Quantise, SystemConfig
from runtime.sim.hardware import KERNELS_PER_LAYER, describe_hardware

PAPER = "klotski"
BATCH = 16
"""Requests of a batch. Table 3 does not give it; of 4 to 64 (section 9.1), its simple pipeline fits
16 best: more would need a slower link than the paper has."""
GROUPS = 4
"""Groups that are measured, 640 requests or more."""
ROUTING = f"one routing; batches of {BATCH}, {PROMPT_TOKENS} and {NEW_TOKENS} tokens"
MEASURED = "with the transfer and attention times of section 1"


def hqq_ratio() -> float:
    """Returns the size of HQQ's weights over that of 16-bit ones."""
    num_weights = 1 << 20
    coded = choose_coding(Quantise.HQQ, 64).num_bytes(num_weights, torch.bfloat16)
    return coded / (2 * num_weights)


def measured_hardware() -> HardwareConfig:
    """Returns environment 1 with the times that section 1 measures.

    An expert's transfer gives the bandwidth, attention the time of each of its kernel launches.
    """
    transfer, attention = (find_published(PAPER, name).value for name in ("transfer", "attention"))
    assert isinstance(transfer, float)
    assert isinstance(attention, float)
    return replace(
        load_hardware("rtx3090-disk"),
        link_bytes_per_second=load_shape("mixtral-8x7b").expert_bytes / transfer,
        kernel_us=1e6 * attention / KERNELS_PER_LAYER,
    )


def replay_groups(
    table: ReplayTable,
    system: SystemConfig,
    title: str,
    *,
    n: int,
    hardware: HardwareConfig | None = None,
    batch: int = BATCH,
    groups: int = GROUPS,
    weight_ratio: float = 1.0,
    measures_accuracy: bool = False,
) -> CellFigures:
    """Returns the figures of groups of `n` micro-batches in one of the paper's environments."""
    environment = ENVIRONMENTS[title]
    stored_bytes = weight_ratio * experts_bytes(environment.model)
    return table.replay(
        system,
        environment.model,
        hardware or load_hardware(environment.hardware),
        share=min(1.0, environment.arena_bytes / stored_bytes),
        batch=batch * n,
        drawn=DrawnGroups(
            environment=title,
            n=n,
            groups=groups,
            # Without the order of hot experts, each batch computes its own (section 5, figure 7a).
            merges_experts=system.hot_first,
            weight_ratio=weight_ratio,
        ),
        measures_accuracy=measures_accuracy,
    )


def measure_throughput(
    table: ReplayTable,
    system: SystemConfig,
    title: str,
    *,
    n: int,
    weight_ratio: float,
    hardware: HardwareConfig | None = None,
) -> Any:
    """Returns tokens/s of groups of `n` batches; as many requests for every `n`."""
    cell = replay_groups(
        table,
        system,
        title,
        n=n,
        hardware=hardware,
        groups=GROUPS * ENVIRONMENTS[title].n // n,
        weight_ratio=weight_ratio,
    )
    seconds = cell.ttft_seconds + (NEW_TOKENS - 1) * cell.tpot_seconds
    return BATCH * n * NEW_TOKENS / seconds


def table_3(table: ReplayTable) -> Iterator[Comparison]:
    """Serves single batches, then groups of them, with one step of the paper after another."""
    klotski = load_system("klotski")
    unordered = replace(klotski, reordered=False, hot_first=False)
    whole_layer = replace(unordered, predictor="dependency", predictor_options={})
    rows: dict[str, tuple[SystemConfig, bool, float]] = {
        "Simple pipeline": (whole_layer, False, 1.0),
        "+ Multi batches": (whole_layer, True, 1.0),
        "+ Only prefetch hot experts": (unordered, True, 1.0),
        "Klotski (+ adjust order)": (klotski, True, 1.0),
        "Klotski (q)": (klotski, True, hqq_ratio()),
    }
    for title, environment in ENVIRONMENTS.items():
        has_times = environment.hardware == "rtx3090-disk"
        for row, (system, is_group, weight_ratio) in rows.items():
            plain, measured = (
                measure_throughput(
                    table,
                    replace(system, name=row),
                    title,
                    n=environment.n if is_group else 1,
                    weight_ratio=weight_ratio,
                    hardware=hardware,
                )
                for hardware in (None, measured_hardware() if has_times else None)
            )
            yield Comparison(
                f"table-3/{row}/{title}",
                plain,
                basis=ROUTING,
                change=MEASURED if has_times else "",
                changed=measured if has_times else None,
            )


def figure_13(table: ReplayTable) -> Iterator[Comparison]:
    """Compares accuracies of the experts that are prefetched as hot, in groups and alone."""
    klotski = load_system("klotski")
    title = "environment 1, Mixtral-8x7B"
    group = replay_groups(table, klotski, title, n=ENVIRONMENTS[title].n, measures_accuracy=True)
    single = replay_groups(table, klotski, title, n=1, batch=1, groups=300, measures_accuracy=True)
    yield Comparison("figure-13/involved", group.precision, basis=f"{ROUTING}; decode")
    yield Comparison("figure-13/hot", group.accuracy, basis=f"{ROUTING}; decode")
    yield Comparison("figure-13/single", single.accuracy, basis="one routing, one request; decode")


def machine_times(table: ReplayTable) -> Iterator[Comparison]:  # noqa: ARG001
    """Compares times of the described machine, without any replay."""
    shape = load_shape("mixtral-8x7b")
    hardware = describe_hardware(load_hardware("rtx3090-disk"), shape)
    basis = "the described machine and the shape's bytes"
    yield Comparison("transfer", hardware.transfer_seconds(shape.expert_bytes), basis=basis)
    yield Comparison("attention", hardware.layer_seconds(16), basis=basis)


FIGURES = (machine_times, table_3, figure_13)
