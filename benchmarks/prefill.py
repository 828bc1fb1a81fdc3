"""`python -m benchmarks prefill`: the time of a prompt over that of its bytes or its computation.

A prompt of hundreds of tokens needs nearly every expert of every layer once. It cannot be faster
than the disk reads the missing ones, nor than the model computes with all of them in memory. For
each prompt these two and the served model are measured in turn, so that ratios hold on a machine
whose speed varies.
"""

import importlib
import inspect
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.config import PrefillConfig
from benchmarks.greedy import generate_greedy
from benchmarks.reports import describe_machine, print_line, write_report
from predictors.units import MIB
from runtime.engine.memory import freeze_objects
from runtime.generation.loading import load
from runtime.hf.tokens import load_tokenizer
from runtime.profiling.bandwidth import measure_disk_bandwidth
from runtime.store.model_check import list_weight_files

MODULES = ("argparse", "inspect", "logging", "tarfile", "zipfile", "pathlib", "random", "shutil")
"""Modules of the standard library whose sources are the prompts."""
DECODE_TOKENS = 8
"""Greedy tokens after each prompt: the next one finds the cache as an answer leaves it."""


@dataclass(frozen=True, kw_only=True)
class PrefillTimes:
    """One prompt."""

    seconds: float
    """Time of its forward pass, as served."""
    compute_seconds: float
    """Time of the same with every expert in memory."""
    link_seconds: float
    """Bytes that were moved in the pass, over the disk's bandwidth."""

    @property
    def over_bound(self) -> float:
        return self.seconds / max(self.compute_seconds, self.link_seconds)


@dataclass(frozen=True, kw_only=True)
class PrefillRow:
    """Medians over the prompts of one system."""

    system: str
    seconds: float
    compute_seconds: float
    link_seconds: float
    over_bound: float
    """Median of the prompts' ratios to the larger of computation and link."""
    moved_mib: float


def run_prefill(config: PrefillConfig) -> None:
    """Measure every system, one after another, each next to a model that is all in memory."""
    machine = describe_machine(config.threads)
    torch.set_num_threads(config.threads)
    rows: list[PrefillRow] = []
    bandwidths: list[float] = []
    resident = load(config.model, budget="100%", system="on-demand")
    with resident.moecast as handle:
        prompts = read_prompts(load_tokenizer(handle.folder), config)
        for prompt in prompts:
            time_forward(resident, prompt)  # reads the experts
        freeze_objects()
        for system in config.system:
            model = load(config.model, budget=config.budget, system=system)
            with model.moecast:
                generate_greedy(model, prompts[0], DECODE_TOKENS)
                times, moved = [], []
                for prompt in [*prompts[1:], prompts[0]]:
                    bandwidth = measure_bandwidth(handle.folder, seed=len(bandwidths))
                    bandwidths.append(bandwidth)
                    before = model.moecast.stats()["bytes_moved"]
                    seconds = time_forward(model, prompt)
                    moved.append(model.moecast.stats()["bytes_moved"] - before)
                    times.append(
                        PrefillTimes(
                            seconds=seconds,
                            compute_seconds=time_forward(resident, prompt),
                            link_seconds=moved[-1] / bandwidth,
                        )
                    )
                    generate_greedy(model, prompt, DECODE_TOKENS)
            rows.append(make_row(system, times, moved))
            print_line(format_row(rows[-1]))
        dtype = str(resident.dtype).removeprefix("torch.")
    write_report(
        config,
        machine=machine,
        dtype=dtype,
        prompts=len(prompts),
        # Of direct reads without any computation: median over the turns.
        disk_bytes_per_second=statistics.median(bandwidths),
        rows=rows,
    )


def read_prompts(tokenizer: PreTrainedTokenizerBase, config: PrefillConfig) -> list[Tensor]:
    """Return the first tokens `[1, T]` of the modules' sources."""
    prompts = []
    for name in MODULES[: config.prompts]:
        tokens = tokenizer(inspect.getsource(importlib.import_module(name)))["input_ids"]
        assert len(tokens) >= config.prompt_tokens, (name, len(tokens))
        prompts.append(torch.tensor([tokens[: config.prompt_tokens]]))
    return prompts


@torch.inference_mode()
def time_forward(model: PreTrainedModel, prompt_1T: Tensor) -> float:
    """Return the seconds of a prompt's forward pass."""
    start = time.perf_counter()
    model(input_ids=prompt_1T, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start


def measure_bandwidth(folder: Path, *, seed: int) -> float:
    """Return the disk's bytes per second: direct random reads of the weights, the best size."""
    rows = measure_disk_bandwidth(list_weight_files(folder), seed=seed)
    return max(row["direct"] or 0.0 for row in rows)


def make_row(system: str, times: list[PrefillTimes], moved: list[int]) -> PrefillRow:
    return PrefillRow(
        system=system,
        seconds=statistics.median(run.seconds for run in times),
        compute_seconds=statistics.median(run.compute_seconds for run in times),
        link_seconds=statistics.median(run.link_seconds for run in times),
        over_bound=statistics.median(run.over_bound for run in times),
        moved_mib=statistics.median(moved) / MIB,
    )


def format_row(row: PrefillRow) -> str:
    return (
        f"{row.system:12} {row.seconds:.2f} s; computation alone {row.compute_seconds:.2f} s, "
        f"{row.moved_mib:.0f} MiB in {row.link_seconds:.2f} s: {row.over_bound:.2f}x the larger"
    )
