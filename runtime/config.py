"""What the runtime can be told: model, system, hardware, and each command's own settings."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from predictors.config import SEVERAL, RunConfig
from predictors.errors import MoecastError

MISSING: Any = "???"
"""OmegaConf's word for what the user must give; importing it would take 3 MiB of every process
that serves a model."""


ORACLE = "oracle"
"""What a system forecasts with that knows the whole routing of a step when it begins."""

BUILTIN = "builtin"
"""Stands for the id of a model that ships with the project."""

REFERENCE_MODEL = "qwen2-moe-tiny"


@dataclass(kw_only=True)
class ModelConfig:
    name: str = REFERENCE_MODEL
    """Short name, as in `model=NAME`."""
    id: str = BUILTIN
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
        if self.id != BUILTIN and self.name == REFERENCE_MODEL:
            # `model.id=FOLDER` alone: whatever is there, it is not the model that ships here.
            self.name = Path(self.id).name


@dataclass(kw_only=True)
class SystemConfig:
    """Which experts to fetch, which to evict, and in which order; see `configs/system/`."""

    name: str = "promoe"
    """Short name, as in `system=NAME`."""
    prefetch: bool = True
    """Fetch the experts that the predictor forecasts; off: only those that routers request."""
    predictor: str | None = None
    """Default of the command's `predictor`: a kind (`stride`, the zoo's MODEL_NAME/stride), a zoo
    entry, a folder, or `oracle` (replays only)."""
    predictor_options: dict[str, Any] = field(default_factory=dict)
    """Options of that predictor that override those of its entry, such as `{ahead: 1}`."""
    fallback: str | None = None
    """Kind to use live where the model has no entry of `predictor`, such as `skip`."""
    eviction: str = "lru"
    """Eviction policy: lru, lfu, fifo, static, neighbour, least-stale, decayed-lfu, reuse, fmoe,
    moe-infinity-sequence, moe-infinity-request, belady (replays only)."""
    eviction_options: dict[str, Any] = field(default_factory=dict)
    """Options of that policy, such as `{decays: [0.9, 0.99]}`."""
    reuse_predictor: str | None = None
    """Predictor of reuse for `reuse` eviction: a kind (`reuse`, the zoo's MODEL_NAME/reuse), a zoo
    entry or a folder."""
    per_layer: bool = True
    """Divide the cache evenly among the layers if it holds top_k experts of each; off: all layers
    share it."""
    priority: str = "nearest-layer"
    """Order in which forecast experts are fetched: nearest-layer, probability-over-distance."""
    chunked: bool = True
    """Fetch experts linear layer by linear layer (ProMoE, section 5.1)."""
    early_preemption: bool = True
    """Request all of a layer's experts when its router has run (ProMoE, section 5.2)."""
    reordered: bool = True
    """Compute a layer's experts in order of readiness (ProMoE, section 5.3)."""
    cancel: bool = False
    """A new forecast of a layer cancels prefetches that it does not name (MoE-Infinity)."""
    lookahead_layers: int | None = None
    """Use forecasts of at most this many layers ahead, where 1 is the next layer to be routed (the
    baselines of MoE-Infinity, request level, section 7.2); null: no limit."""
    predictor_priority: bool = True
    """Fetch in the order that the predictor's paper defines, if it defines one; off: by `priority`
    (MoE-Infinity, request level, table 4, without layer proximity)."""
    hot_first: bool = False
    """Among experts at the same distance, compute and fetch those with the most tokens first
    (Klotski, section 5)."""
    drop_used: bool = False
    """Evict an expert as soon as all tokens have used it, and a forecast one as soon as its layer
    is routed without it, unless the eviction policy keeps it permanently (Klotski, section 5;
    MoE-Infinity, request level, section 7.2, where caching is off)."""
    idle_prefetch: bool = False
    """Use an idle link to fetch the missing expert with the highest score of the eviction policy;
    only `reuse` has such scores."""
    adaptive: bool = False
    """Turn prefetching off while measurements show that it slows decoding."""
    watchdog_seconds: float = 2.0
    """Transfers that take longer count as hung: their slot is quarantined, their expert read
    again."""


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
    store_bytes_per_second: float = 0.0
    """Bandwidth of the disk below host memory; 0: it is never the bottleneck."""
    store_latency_us: float = 0.0
    """Time from asking the disk for a chunk to its first byte."""
    host_bytes: float = 0.0
    """Host memory for experts, between the disk and the device; 0: one link brings them all."""
    memory_bytes_per_second: float = 0.0
    """Bandwidth at which the compute device reads weights."""
    flops: float = 0.0
    """Dense multiply-adds a second, times two, in the weights' dtype."""
    kernel_us: float = 0.0
    """Overhead of starting one kernel."""
    predictor_us: float = 0.0
    """Latency of one prediction, beside the computation."""


@dataclass(kw_only=True)
class ShapeConfig:
    """The model whose bytes and computation a replay stands for; its routing is the trace's."""

    name: str = "trace"
    """Short name, as in `shape=NAME`."""
    source: str = "the traced model's own checkpoint"
    """Where the figures come from."""
    num_layers: int = 0
    """Layers with routed experts."""
    num_experts: int = 0
    """Routed experts of each."""
    top_k: int = 0
    """Of these, how many a token is routed to."""
    hidden_size: int = 0
    """Width of the state that routers see."""
    expert_bytes: int = 0
    """Size of one expert; 0: the traced model's own shape."""
    layer_bytes: int = 0
    """Other weights that one layer reads (attention, shared experts)."""
    bytes_per_weight: float = 2.0
    """Of both; the arithmetic is that of the weights, whatever they are packed in."""

    @property
    def is_own(self) -> bool:
        """Whether sizes are to be read from the traced model."""
        return self.expert_bytes == 0


class PageCache(StrEnum):
    """What reading experts leaves behind in the system's page cache."""

    BYPASS = "bypass"
    """Nothing: direct reads; where a file system allows none, `drop`."""
    DROP = "drop"
    """Nothing: what was read is dropped behind every read."""
    KEEP = "keep"
    """Everything, while the system has room: fast where the checkpoint fits in memory, but that
    memory is not counted in the budget."""


class Quantise(StrEnum):
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(kw_only=True)
class StoreConfig:
    path: Path | None = None
    """Folder of a packed store (`python -m runtime pack`); none: the checkpoint, in place."""
    page_cache: PageCache = PageCache.BYPASS
    """bypass: direct reads; drop: dropped behind every read; keep: memory beyond the budget."""


@dataclass(kw_only=True)
class PackConfig(RunConfig):
    model: ModelConfig = field(default_factory=ModelConfig)
    output: Path = MISSING
    """Folder to make; what was packed before an interruption is kept and completed."""
    quantise: Quantise = Quantise.NONE
    """Store experts as integers (int8, int4) with a scale for each group; outputs change."""
    group_size: int = 64
    """Weights that share a scale; only with quantise=int8 or int4."""
    overwrite: bool = False
    """Replace another store at `output`, in one step and only when the new one is complete."""

    def __post_init__(self) -> None:
        if self.group_size < 8 or self.group_size % 2:
            raise MoecastError(f"group_size={self.group_size}: must be even and at least 8")


@dataclass(kw_only=True)
class ServedConfig(RunConfig):
    """What every command that serves a model can be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    system: SystemConfig = field(default_factory=SystemConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    predictor: str | None = None
    """Kind (stride), zoo entry (NAME, NAME@digest) or folder of one; none: the system's own."""
    device: str = "auto"
    """Where the model computes: auto (a GPU if there is one), cpu, cuda, cuda:1."""
    devices: list[str] = field(default_factory=list)
    """Several in place of `device`: experts are spread over them (cuda:0,cuda:1)."""
    host_budget: str | None = None
    """Memory for experts on the host, below a device; none: all of them, where memory is free."""
    trace_events: Path | None = None
    """File for a timeline that ui.perfetto.dev opens; none: no timeline."""


@dataclass(kw_only=True)
class GenerateConfig(ServedConfig):
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


class VerifyReference(StrEnum):
    """What `verify` compares with."""

    PLAIN = "plain"
    LAZY = "lazy"


@dataclass(kw_only=True)
class VerifyConfig(ServedConfig):
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
    reference: VerifyReference = VerifyReference.PLAIN
    """plain: all experts in memory; lazy: one at a time, for models that do not fit."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise MoecastError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        if not self.budgets or not self.prompts:
            raise MoecastError("budgets and prompts must not be empty: nothing would be compared")


@dataclass(kw_only=True)
class DoctorConfig(RunConfig):
    model: ModelConfig = field(default_factory=ModelConfig)
    predictor: str | None = None
    """Zoo entry or folder of one for the outlook on `promoe`; none: the next layer's router."""
    budgets: list[str] = field(default_factory=lambda: ["10%", "25%", "50%", "75%", "100%"])
    """Budgets of the outlook."""
    seconds: float = 8.0
    """Time in which routing is recorded for the outlook, at most."""
    digests: bool = False
    """Hash every weights file, and compare with what its origin says."""
    users: int | None = None
    """Users at the same time: in place of examining this machine, say what each `hardware` needs to
    give each of them `tps` tokens a second."""
    tps: float | None = None
    """Tokens a second of each of the `users`."""
    hardware: list[HardwareConfig] = field(default_factory=list, metadata={SEVERAL: "all"})
    """Machines that a load is replayed on; `local` only with `shape=trace`."""
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    """The model whose bytes a load's replays have; their routing is that of `model`."""

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise MoecastError(f"seconds={self.seconds}: must be above 0")
        if (self.users is None) != (self.tps is None):
            raise MoecastError(
                f"users={self.users}, tps={self.tps}: give both for a load (users=8 tps=5), "
                "neither to examine this machine"
            )
        if self.users is not None and self.users < 1:
            raise MoecastError(f"users={self.users}: must be at least 1")
        if self.tps is not None and self.tps <= 0:
            raise MoecastError(f"tps={self.tps}: must be above 0")


@dataclass(kw_only=True)
class InflateConfig(RunConfig):
    model: ModelConfig = field(default_factory=ModelConfig)
    """Its dtype is what the experts are stored in: then a slot's bytes are the file's bytes."""
    output: Path = MISSING
    """Folder of the new checkpoint."""
    expert_size: str | None = None
    """Bytes of each expert, as a size (8MiB); the nearest that whole neurons reach above it."""
    total_size: str | None = None
    """Bytes of all experts together (2GiB), in place of `expert_size`."""

    def __post_init__(self) -> None:
        if (self.expert_size is None) == (self.total_size is None):
            raise MoecastError(
                f"expert_size={self.expert_size}, total_size={self.total_size}: give one of them, "
                "for example expert_size=8MiB"
            )


SCHEMAS: dict[str, type] = {
    "model/base": ModelConfig,
    "system/base": SystemConfig,
    "hardware/base": HardwareConfig,
    "shape/base": ShapeConfig,
    "generate": GenerateConfig,
    "verify": VerifyConfig,
    "inflate": InflateConfig,
    "doctor": DoctorConfig,
    "pack": PackConfig,
}

BUILTIN_MODELS = Path(__file__).parent / "models"
