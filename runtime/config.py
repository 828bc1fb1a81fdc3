"""What the runtime can be told: model, system, hardware, and each command's own settings."""

from dataclasses import dataclass, field
from pathlib import Path

from predictors.config import RunConfig
from predictors.errors import MoecastError


@dataclass(kw_only=True)
class ModelConfig:
    name: str = "qwen2-moe-tiny"
    """Short name, as in `model=NAME`."""
    id: str = "builtin"
    """Repository on the Hub, a local folder, or `builtin`: the reference model that ships here."""
    revision: str | None = None
    """Commit on the Hub; a branch name would let the model change under its predictors."""
    dtype: str = "auto"
    """Dtype of weights and activations: auto (the checkpoint's own), float32, bfloat16, float16."""
    local_only: bool = True
    """Only what is on this machine; false lets the Hub be asked."""

    def __post_init__(self) -> None:
        allowed = ("auto", "float32", "bfloat16", "float16")
        if self.dtype not in allowed:
            raise MoecastError(f"model.dtype={self.dtype!r}: allowed are {', '.join(allowed)}")


@dataclass(kw_only=True)
class SystemConfig:
    name: str = "promoe"
    """Short name, as in `system=NAME`."""
    prefetch: bool = True
    """Fetch what the predictor forecasts; off: only what routers ask for."""
    eviction: str = "lru"
    """Which expert to drop: lru, lfu, fifo."""
    per_layer: bool = True
    """Divide the arena among the layers, where it holds top_k experts of each; else all share."""
    urgency: str = "nearest-layer"
    """Which predicted expert comes first: nearest-layer, probability-over-distance."""
    chunked: bool = True
    """Fetch linear layer by linear layer (promoe 5.1)."""
    early_preemption: bool = True
    """Ask for all of a layer's experts when its router has spoken (promoe 5.2)."""
    reordered: bool = True
    """Compute in order of readiness (promoe 5.3)."""


@dataclass(kw_only=True)
class HardwareConfig:
    name: str = "local"
    """Short name, as in `hardware=NAME`."""
    source: str = "measured on this machine"
    """Where the figures come from."""
    measured: bool = True
    """Measure this machine and this model; the other fields are then not used."""
    link_bytes_per_second: float = 0.0
    """Bandwidth of the link that experts come over."""
    link_latency_us: float = 0.0
    """Time from starting a chunk to its first byte."""
    memory_bytes_per_second: float = 0.0
    """Bandwidth at which the compute device reads weights."""
    flops: float = 0.0
    """Dense multiply-adds a second, times two, in the weights' dtype."""
    kernel_us: float = 0.0
    """Overhead of starting one kernel."""
    expert_bytes: int = 0
    """Size of one expert of the model that the profile stands for; 0: the replayed model's own."""
    layer_bytes: int = 0
    """Other weights that one layer reads (attention, shared experts)."""
    predictor_us: float = 0.0
    """Latency of one prediction, beside the computation."""


@dataclass(kw_only=True)
class GenerateConfig(RunConfig):
    model: ModelConfig = field(default_factory=ModelConfig)
    system: SystemConfig = field(default_factory=SystemConfig)
    predictor: str | None = None
    """Zoo entry (NAME, NAME@digest) or the folder of one; none: no prefetching."""
    budget: str = "50%"
    """Memory for experts: a size (4GiB, 512MiB) or a share of all experts' bytes (50%)."""
    prompt: str = "The heart pumps blood"
    """What to continue."""
    max_new_tokens: int = 64
    """Tokens to generate at most."""
    temperature: float = 0.0
    """0: greedy; above: sampled, by `seed`."""
    verify: bool = False
    """Also run plain Transformers (all experts in memory) and compare the tokens."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise MoecastError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        if self.temperature < 0:
            raise MoecastError(f"temperature={self.temperature}: must be 0 (greedy) or above")
        if not self.prompt:
            raise MoecastError("prompt is empty: nothing to continue")


@dataclass(kw_only=True)
class VerifyConfig(RunConfig):
    model: ModelConfig = field(default_factory=ModelConfig)
    system: SystemConfig = field(default_factory=SystemConfig)
    predictor: str | None = None
    """Zoo entry or folder of one; none: no prefetching."""
    budgets: list[str] = field(default_factory=lambda: ["15%", "50%", "100%"])
    """Budgets to try, as for `generate`."""
    prompts: list[str] = field(
        default_factory=lambda: [
            "The heart pumps blood",
            "It was a dark and stormy night",
            "Return a new list",
        ]
    )
    """Prompts to continue."""
    max_new_tokens: int = 32
    """Greedy tokens to compare for each prompt."""


SCHEMAS: dict[str, type] = {
    "model/base": ModelConfig,
    "system/base": SystemConfig,
    "hardware/base": HardwareConfig,
    "generate": GenerateConfig,
    "verify": VerifyConfig,
}

BUILTIN_MODELS = Path(__file__).parent / "models"
