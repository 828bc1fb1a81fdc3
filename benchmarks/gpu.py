"""`python -m benchmarks gpu`: a first look at an accelerator, from a checkout without any model.

Weights are random, so that nothing has to be downloaded. On the CPU the same steps run over two
tiers of host memory, to try the benchmark where there is no accelerator.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

import runtime
from benchmarks.config import GpuConfig
from benchmarks.greedy import generate_greedy
from benchmarks.random_model import scaled_config, write_checkpoint
from benchmarks.reports import describe_machine, print_line, write_report
from predictors.config import require_at_least
from predictors.errors import MoecastError
from runtime.accelerator import (
    Accelerator,
    describe_accelerator,
    is_accelerator,
    open_accelerator,
)
from runtime.config import ModelConfig
from runtime.engine.devices import choose_device

ALL_RESIDENT = "all resident"
SYSTEMS = {"on-demand": None, "promoe": "skip", "moecast": "skip"}
"""Each with a predictor that needs no training: the next layer's own router."""
PROMPT_TOKENS = 16
VOCABULARY = 512
TINY_BUDGET, EVERYTHING = "10%", "100%"
FILL_SECONDS = 60
COPY_BYTES = 256 << 20
MATRIX = 4096
PRODUCTS = 64


@dataclass(frozen=True, kw_only=True)
class ExactnessRow:
    """A model with an arena of a few experts next to the same with all of them resident."""

    dtype: str
    steps: int
    logits_equal: bool
    """The prompt's logits are the same bits."""
    tokens_equal: bool
    """All decode steps chose the same tokens."""
    misses: int
    """Experts that were copied while the tokens were decoded."""
    over_plain: float
    """Largest difference of the prompt's logits from Transformers' own loop on the device."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    copy_seconds: float
    compute_seconds: float
    both_seconds: float
    share: float
    """Part of the shorter one that the longer one hides: 1 all of it, 0 none."""


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    system: str
    budget: str
    tpot_mean_seconds: float
    tpot_median_seconds: float
    tpot_p99_seconds: float
    over_all_resident: float
    """Mean TPOT over that with all experts resident."""
    hit_rate: float
    tokens_equal: bool
    """The same tokens as with all experts resident."""


class StepClock:
    """A streamer of `generate` that notes the time at which each token is there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:  # noqa: ARG002
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """All times are there."""

    def steps(self) -> list[float]:
        """Returns the seconds of each decode step; the first times are the prompt's."""
        return [end - start for start, end in itertools.pairwise(self.times[1:])]


def tiny_config() -> Qwen3MoeConfig:
    """Returns the shape of a model whose steps are all control and copies."""
    config = scaled_config(4, VOCABULARY)
    config.vocab_size, config.hidden_size, config.intermediate_size = VOCABULARY, 64, 64
    config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok = 32, 32, 2
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    return config


@contextmanager
def served(
    folder: Path, device: torch.device, *, budget: str, system: str, dtype: str = "bfloat16"
) -> Iterator[PreTrainedModel]:
    """Yields the model with its experts in two tiers, all of them in host memory."""
    model = runtime.load(
        ModelConfig(name="random", id=str(folder), dtype=dtype),
        system=system,
        predictor=SYSTEMS[system],
        budget=budget,
        host_budget="100%",
        device=device,
    )
    with model.moecast, torch.no_grad():
        if budget == EVERYTHING:
            wait_until_complete(model)
        yield model


def wait_until_complete(model: PreTrainedModel) -> None:
    """Waits until idle time has filled the arena with all experts.

    Raises:
        MoecastError: it takes too long.
    """
    deadline = time.monotonic() + FILL_SECONDS
    engine = model.moecast.engine
    while not engine.cache.is_complete:
        if time.monotonic() > deadline:
            raise MoecastError(f"the experts were not all resident after {FILL_SECONDS} s")
        engine.move_when_idle()
        time.sleep(0.01)


def make_prompt(device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (1, PROMPT_TOKENS), generator=generator).to(device)


def generate(model: PreTrainedModel, prompt: Tensor, steps: int, clock: StepClock) -> list[int]:
    return generate_greedy(model, prompt, steps, streamer=clock)[0].tolist()


def compare_exactness(
    folder: Path, device: torch.device, dtype: str, config: GpuConfig
) -> ExactnessRow:
    prompt = make_prompt(device, config.seed)
    runs = {}
    for budget in (EVERYTHING, TINY_BUDGET):
        with served(folder, device, budget=budget, system="promoe", dtype=dtype) as model:
            logits = model(prompt).logits
            tokens = generate(model, prompt, config.steps, StepClock())
            runs[budget] = logits, tokens, model.moecast.stats()["misses"]
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), experts_implementation="eager", trust_remote_code=False
    )
    with torch.no_grad():
        reference = plain.to(device)(prompt).logits
    (all_logits, all_tokens, _), (logits, tokens, misses) = runs[EVERYTHING], runs[TINY_BUDGET]
    return ExactnessRow(
        dtype=dtype,
        steps=config.steps,
        logits_equal=torch.equal(logits, all_logits),
        tokens_equal=tokens == all_tokens,
        misses=misses,
        over_plain=(logits - reference).abs().max().item(),
    )


def measure_overlap(accelerator: Accelerator, device: torch.device) -> Overlap:
    """Times copies and matrix products alone, then issued together on two streams."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=accelerator.pins_memory)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    matrix = torch.ones(MATRIX, MATRIX, dtype=torch.bfloat16, device=device)
    stream = accelerator.make_stream()

    def copy() -> None:
        with accelerator.use(stream):
            accelerator.copy(target, source)

    def compute() -> None:
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)

    def seconds(*parts: Any) -> float:
        times = []
        for _ in range(6):
            accelerator.synchronize()
            start = time.perf_counter()
            for part in parts:
                part()
            accelerator.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])  # the first loads kernels

    alone, computing, both = seconds(copy), seconds(compute), seconds(copy, compute)
    share = (alone + computing - both) / min(alone, computing)
    return Overlap(copy_seconds=alone, compute_seconds=computing, both_seconds=both, share=share)


def measure_speed(folder: Path, device: torch.device, config: GpuConfig) -> list[SpeedRow]:
    """Times each system at each budget; a first request fills the arena and is in no figure."""
    cases = [(ALL_RESIDENT, "promoe", EVERYTHING)]
    cases += [(name, name, budget) for budget in config.budget for name in SYSTEMS]
    rows: list[SpeedRow] = []
    first: tuple[float, list[int]] | None = None
    for label, system, budget in cases:
        clock = StepClock()
        with served(folder, device, budget=budget, system=system) as model:
            generate(model, make_prompt(device, config.seed + 1), 8, StepClock())
            before = model.moecast.stats()
            prompt = make_prompt(device, config.seed)
            tokens = generate(model, prompt, config.max_new_tokens, clock)
            after = model.moecast.stats()
        steps = clock.steps()
        first = first or (statistics.fmean(steps), tokens)
        hits, requests = (after[name] - before[name] for name in ("hits", "requests"))
        rows.append(
            SpeedRow(
                system=label,
                budget=budget,
                tpot_mean_seconds=statistics.fmean(steps),
                tpot_median_seconds=statistics.median(steps),
                tpot_p99_seconds=statistics.quantiles(steps, n=100, method="inclusive")[-1],
                over_all_resident=statistics.fmean(steps) / first[0],
                hit_rate=hits / requests,
                tokens_equal=tokens == first[1],
            )
        )
        mean = 1e3 * rows[-1].tpot_mean_seconds
        print_line(
            f"{label} at {budget}: {mean:.1f} ms a token, {100 * hits / requests:.0f} % hits"
        )
    return rows


def run_gpu(config: GpuConfig) -> None:
    """Runs all steps and writes the report.

    Raises:
        MoecastError: there is no accelerator, or an option is out of range.
    """
    began = time.perf_counter()
    require_at_least(config, max_new_tokens=3)
    machine = describe_machine()
    device = choose_device(config.device)
    if config.device == "auto" and device.type == "cpu":
        raise MoecastError(
            "this torch sees no CUDA or XPU device; device=cpu tries the benchmark with a small "
            "model"
        )
    named = name_accelerator(device)
    print_line(f"{device}: {named['name'] if named else machine.cpu}")
    config.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=config.work) as scratch:
        figures = measure(config, device, Path(scratch))
    write_report(config, machine=machine, **figures, seconds=time.perf_counter() - began)
    if not all(row.logits_equal and row.tokens_equal for row in figures["exactness"]):
        raise MoecastError(f"tokens differ; see {config.output}")


def measure(config: GpuConfig, device: torch.device, work: Path) -> dict[str, Any]:
    """Writes the models, and returns what is measured with them.

    Name and memory of the accelerator, and the overlap, are None on the CPU, which copies and
    computes with the same cores.
    """
    accelerator = open_accelerator(device)
    tiny, large = work / "tiny", work / "large"
    write_checkpoint(tiny_config(), tiny, seed=config.seed)
    exactness = [
        compare_exactness(tiny, device, dtype, config) for dtype in ("float32", "bfloat16")
    ]
    for row in exactness:
        print_line(f"{row.dtype}: {row.steps} steps, tokens equal: {row.tokens_equal}")
    overlap = None if accelerator is None else measure_overlap(accelerator, device)
    if overlap is not None:
        print_line(f"copies and computation overlap by {100 * overlap.share:.0f} %")
    if accelerator is None:
        large, shape = tiny, tiny_config()
    else:
        shape = scaled_config(config.num_layers, VOCABULARY)
        write_checkpoint(shape, large, seed=config.seed)
    speed = measure_speed(large, device, config)
    return {
        "device": str(device),
        "accelerator": name_accelerator(device),
        "torch": torch.__version__,
        "exactness": exactness,
        "overlap": overlap,
        "experts_bytes": count_expert_bytes(shape),
        "speed": speed,
    }


def name_accelerator(device: torch.device) -> dict[str, Any] | None:
    return describe_accelerator(device) if is_accelerator(device) else None


def count_expert_bytes(shape: Qwen3MoeConfig) -> int:
    """Returns the bytes of all experts in bfloat16."""
    expert = 3 * shape.hidden_size * shape.moe_intermediate_size * 2
    return shape.num_hidden_layers * shape.num_experts * expert
