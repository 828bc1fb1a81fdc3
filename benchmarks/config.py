"""Settings of the benchmarks of one file; those of a folder have theirs next to them.

The docstring under a field is its help text.
"""

import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from predictors.config import RunConfig, require_at_least, several
from runtime.config import SystemConfig
from runtime.sim.hardware import LATENCY_FILE

RESULTS = Path("benchmarks/results")
ENVIRONMENTS = Path("runs/environments")
MAY_BE_ZERO = ("context", "seed", "warm_requests", "warm_ups")
"""Numbers of options; all others are 1 or more."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(RunConfig):
    output: Path = RESULTS / "NAME.json"
    """JSON file for the results; NAME is that of the benchmark."""

    def __post_init__(self) -> None:
        words = re.findall("[A-Z][a-z]*", type(self).__name__.removesuffix("Config"))
        output = self.output.with_stem(self.output.stem.replace("NAME", "_".join(words).lower()))
        object.__setattr__(self, "output", output)
        numbers = [field.name for field in fields(self) if type(getattr(self, field.name)) is int]
        require_at_least(self, **{name: int(name not in MAY_BE_ZERO) for name in numbers})


@dataclass(frozen=True, kw_only=True)
class TablesConfig(RunConfig):
    """`python -m benchmarks tables` has no options."""


@dataclass(frozen=True, kw_only=True)
class CapacityConfig(BenchmarkConfig):
    """`python -m benchmarks capacity` has no other options."""


@dataclass(frozen=True, kw_only=True)
class LockstepConfig(BenchmarkConfig):
    clients: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    """Numbers of sequences that are generated together, with commas between them."""
    exact: list[str] = field(default_factory=lambda: ["eager", "shared"])
    """Settings of `model.exact`, with commas between them; the first with one sequence is the
    reference."""
    dtype: str = "float32"
    """Dtype of the reference model."""
    budget: str = "100%"
    """Memory for experts."""
    system: str = "on-demand"
    """System that serves."""
    repetitions: int = 5
    """Rounds; the median of their ratios is reported."""
    steps: int = 24
    """Decode steps of a measurement."""
    threads: int = 2
    """Threads of PyTorch."""


@dataclass(frozen=True, kw_only=True)
class MoecastConfig(BenchmarkConfig):
    trace: Path
    """Folder of a trace with all signals."""
    entries: Path
    """The model's name in the zoo, or a folder, of the entries residual, reuse and stride, as
    `python -m train predictor=all` writes them."""


@dataclass(frozen=True, kw_only=True)
class DraftsConfig(BenchmarkConfig):
    kinds: dict[str, Path]
    """File of JSON lines with prompts for each kind: `{code: PATH, chat: PATH}`."""
    model: str = "qwen2-moe-tiny"
    """Model: its short name, or a folder."""
    budget: str = "25%"
    """Memory for experts."""
    system: str = "moecast"
    prompts: int = 4
    """Prompts of each kind."""
    prompt_tokens: int = 192
    new_tokens: int = 64
    repetitions: int = 3
    threads: int = 1
    """Threads of PyTorch."""


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(BenchmarkConfig):
    model: str = "qwen2-moe-tiny"
    """Model: its short name, or a folder."""
    budget: str = "25%"
    """Memory for experts."""
    system: list[str] = field(default_factory=lambda: ["on-demand", "promoe", "moecast"])
    """Systems, with commas between them."""
    prompts: int = 8
    """Prompts: sources of as many modules of the standard library."""
    prompt_tokens: int = 512
    threads: int = 2
    """Threads of PyTorch."""


@dataclass(frozen=True, kw_only=True)
class DequantiseConfig(BenchmarkConfig):
    repetitions: int = 15
    """Rounds; the median is reported."""
    threads: int = 1
    """Threads of PyTorch."""


@dataclass(frozen=True, kw_only=True)
class LookaheadConfig(BenchmarkConfig):
    traces: dict[str, Path]
    """Trace of each kind of prompts: `{docs: PATH, code: PATH}`."""
    entries: dict[str, str] = field(default_factory=dict)
    """Zoo entries of predictors for eviction, by the name to show."""
    tokens: int = 1000


@dataclass(frozen=True, kw_only=True)
class LatencyConfig(BenchmarkConfig):
    output: Path = LATENCY_FILE
    repetitions: int = 8
    """Requests, each of a prompt and some decode steps."""


@dataclass(frozen=True, kw_only=True)
class RoutingConfig(BenchmarkConfig):
    log: Path
    """Published routing log, as `collect import` reads it."""
    origin: str = "unknown"
    """Source and licence of the log."""
    model_id: str = "unknown"
    """Model whose routing it is."""
    num_experts: int | None = None
    """Experts of each layer; default: the highest id of the log + 1."""
    budget: list[str] = field(default_factory=lambda: ["5%", "10%", "25%", "50%"])
    """Memory for experts."""
    system: list[str] = field(default_factory=list)
    """Systems to replay, with commas between them; all unless given."""
    workers: int | None = None
    """Processes that replay; default: one for each core."""


@dataclass(frozen=True, kw_only=True)
class QuantisedConfig(BenchmarkConfig):
    held_out: Path
    """Held-out token ids (uint16) that `python -m train.reference` keeps apart."""
    environments: Path = ENVIRONMENTS
    """Folder of the environments that `python -m benchmarks environments` builds: lm-eval's."""


@dataclass(frozen=True, kw_only=True)
class FormatsConfig(BenchmarkConfig):
    model: Path
    """Folder of the reference model inflated by `python -m runtime inflate`."""
    budget: str = "25%"
    """Memory for experts, as a share of the float32 experts' bytes, for every format."""
    system: list[str] = field(default_factory=lambda: ["on-demand", "promoe", "moecast"])
    repetitions: int = 3
    """Runs of each format with each system, in turns."""
    requests: int = 2
    new_tokens: int = 24
    """Greedy tokens of each request."""
    warm_up_tokens: int = 64
    """Greedy tokens of the request before them."""


@dataclass(frozen=True, kw_only=True)
class PayoffConfig(BenchmarkConfig):
    model: str = "builtin"
    """Model: `builtin` or a folder."""
    format: list[str] = field(default_factory=lambda: ["bfloat16", "float32", "int8", "int4"])
    """Formats of the experts, with commas between them, as in the benchmark `formats`."""
    budget: list[str] = field(default_factory=lambda: ["10%", "25%", "50%", "75%", "100%"])
    """Shares of the experts in memory, with commas between them."""
    repetitions: int = 2
    """Runs of each format, budget and system, in turns."""
    requests: int = 4
    new_tokens: int = 64
    """Greedy tokens of each request; at least 2, since the first is not timed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, new_tokens=2)


@dataclass(frozen=True, kw_only=True)
class ValidateConfig(BenchmarkConfig):
    model: Path
    """Folder of a model: `python -m runtime inflate total_size=2GiB model.dtype=float32`."""
    budget: list[str] = field(default_factory=lambda: ["25%", "50%", "75%"])
    """Memory for experts, with commas between the sizes."""
    system: list[SystemConfig] = several("system")
    """Systems to run live and simulated; those that know the future routing are left out."""
    repetitions: int = 2
    """Runs of each budget and system, interleaved."""
    max_new_tokens: int = 32
    """Tokens to generate for each prompt."""


@dataclass(frozen=True, kw_only=True)
class KernelsConfig(BenchmarkConfig):
    kind: list[str] = field(default_factory=lambda: ["q4_0", "q4_K", "q6_K", "q8_0"])
    """GGUF types, with commas between them."""
    threads: list[int] = field(default_factory=lambda: [1, os.cpu_count() or 1])
    """Threads, with commas between the numbers."""
    repetitions: int = 200
    """Tokens of each type and number of threads."""


@dataclass(frozen=True, kw_only=True)
class RandomConfig(RunConfig):
    output: Path
    """Folder for the checkpoint."""
    num_layers: int = 4
    """Layers, of which Qwen3-30B-A3B has 48; the vocabulary shrinks in the same proportion."""
    routing: Path | None = None
    """Routing log (as `collect import` reads it) whose tokens greedy decoding repeats, with the
    experts that it names; the model takes as many experts per token as the log."""


@dataclass(frozen=True, kw_only=True)
class GpuConfig(BenchmarkConfig):
    device: str = "auto"
    """Accelerator to measure; cpu runs the same steps with a small model and a second tier of host
    memory, to try the benchmark itself."""
    work: Path = Path("runs/gpu")
    """Folder for the models."""
    num_layers: int = 7
    """Layers of Qwen3-30B-A3B's shape with random weights, 1.2 GB each."""
    budget: list[str] = field(default_factory=lambda: ["25%", "50%"])
    """Memory for experts on the device, with commas between them."""
    steps: int = 1000
    """Decode steps in an arena of a few experts."""
    max_new_tokens: int = 64
    """Timed tokens of each system."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentsConfig(RunConfig):
    name: list[str] = field(default_factory=list)
    """Environments to build, with commas between them; all unless given."""
    folder: Path = ENVIRONMENTS
    """Folder for the environments."""
