"""Settings of the runtime: model, system, hardware, and those of each command."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from predictors.config import RunConfig, chosen, require_at_least
from predictors.errors import MoecastError
from zoo.config import PullConfig

BUILTIN = "builtin"
"""The id of models that ship with the project."""
BUILTIN_MODELS = Path(__file__).parent / "models"

GGUF = ".gguf"
"""Suffix of a model in one file."""

REFERENCE_MODEL = "qwen2-moe-tiny"

DTYPES = ("auto", "float32", "bfloat16", "float16")

AUTO = "auto"
"""Value of `budget`: computed from free memory."""

PROMPT_LOOKUP = "prompt-lookup"
"""Value of `draft`: tokens that followed the same text before, in the prompt or the answer."""


class DecodeKernels(StrEnum):
    """Kernels of steps of one token in bfloat16 and float16 on a CPU."""

    AUTO = "auto"
    LIBRARY = "library"
    """Those of all steps, as Transformers and PyTorch choose them."""
    OWN = "own"
    """Matrix products without oneDNN, and attention in float32."""


class DenseFormat(StrEnum):
    """The format in which linear layers outside of the experts are multiplied."""

    OWN = "own"
    """The model's dtype, or the types of a GGUF file."""
    INT8 = "int8"
    """q8_0."""
    INT4 = "int4"
    """q4_K."""
    Q8_0 = "q8_0"
    Q6_K = "q6_K"
    Q5_K = "q5_K"
    Q4_K = "q4_K"
    Q4_0 = "q4_0"


class Exact(StrEnum):
    """The function of Transformers whose bits a served model has."""

    AUTO = "auto"
    EAGER = "eager"
    """The loop over experts."""
    GROUPED = "grouped"
    """`grouped_mm`, one product for all experts."""
    SHARED = "shared"
    """The loop over experts, and all else in a batch of eight copies of each sequence, where
    sequences that are generated together share matrix products."""


def check_sampling(temperature: float, top_p: float = 1.0) -> None:
    """Raise MoecastError for options that no token can be drawn with."""
    if temperature < 0:
        raise MoecastError(f"temperature={temperature}: must be 0 (greedy) or above")
    if not 0 < top_p <= 1:
        raise MoecastError(f"top_p={top_p}: must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str = REFERENCE_MODEL
    """Short name, as in `model=NAME`."""
    id: str = BUILTIN
    """Repository on the Hub, a local folder, a GGUF file, or `builtin`: the reference model that
    ships here."""
    revision: str | None = None
    """Commit on the Hub; a branch name would let the model change under its predictors."""
    base: str | None = None
    """Model that this one is a quantisation of (`model_id` of its zoo entries), where the entries
    have no samples of the routers that show it."""
    dtype: str = "auto"
    """Dtype of weights and activations: auto (the checkpoint's own), float32, bfloat16, float16."""
    decode_kernels: DecodeKernels = DecodeKernels.AUTO
    """Kernels of steps of one token in bfloat16 or float16 on a CPU: library (Transformers' own),
    own (without oneDNN, attention in float32; last bits differ), auto (own where that is faster).
    """
    dense_format: DenseFormat = DenseFormat.OWN
    """Format of attention, shared experts and output layer: own (the model's dtype; of a GGUF file
    on a CPU, its own types), int8 or int4 (rounded when the model is loaded; outputs change)."""
    decode_threads: int | None = None
    """Threads that compute a step of one token on a CPU; null: one or all but one, whichever is
    faster, and all for moecast's own kernels."""
    exact: Exact = Exact.AUTO
    """Implementation of Transformers whose bits the outputs have: eager (a loop over experts),
    grouped (`grouped_mm`), auto (eager on a CPU; on a GPU grouped where possible), shared (eager,
    and sequences that are generated together share the products of dense layers; other last bits).
    """
    local_only: bool = True
    """Use only files on this machine; false: download from the Hub if needed."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise MoecastError(f"model.dtype={self.dtype!r}: allowed are {', '.join(DTYPES)}")
        if self.base is not None and not self.base.strip():
            raise MoecastError(
                f"model.base={self.base!r}: must be the model that this one is a quantisation of, "
                "such as Qwen/Qwen3-30B-A3B"
            )
        require_at_least(self, "model.", decode_threads=1)

    @property
    def kernels(self) -> dict[str, Any]:
        """The settings besides `dtype` that results' bits and times depend on, without defaults."""
        names = ("decode_kernels", "dense_format", "decode_threads", "exact")
        given = {name: getattr(self, name) for name in names}
        return {name: one for name, one in given.items() if one != getattr(ModelConfig, name)}


@dataclass(frozen=True, kw_only=True)
class SystemConfig:
    """Decides which experts to fetch and to evict, and in which order; see `configs/system/`."""

    name: str = "custom"
    """Short name, as in `system=NAME`; the other defaults are none of these systems."""
    prefetch: bool = True
    """Fetch the experts that the predictor forecasts; off: only those that routers request."""
    predictor: str | None = None
    """Default of the command's `predictor`: a kind (`stride`, the zoo's MODEL_NAME/stride), a zoo
    entry or a folder."""
    predictor_options: dict[str, Any] = field(default_factory=dict)
    """Options of that predictor that override those of its entry, such as `{ahead: 1}`."""
    fallback: dict[str, Any] = field(default_factory=dict)
    """Kinds to use where the model has no entry of `predictor`, with their options: the first that
    is possible, as in `{skip: {}, correlation: {least: 0.3}}`."""
    eviction: str = "lru"
    """Eviction policy: lru, lfu, static, first-layers, neighbour, regret, reuse, fmoe,
    moe-infinity-sequence, moe-infinity-request, belady (replays only)."""
    eviction_options: dict[str, Any] = field(default_factory=dict)
    """Options of that policy, such as `{buffers: 2}`."""
    host_window: bool = False
    """Hold the layers that are computed next in host memory, and read them ahead while the disk is
    idle (Klotski, section 6.1); off: host memory evicts as the device does."""
    reuse_predictor: str | None = None
    """Predictor of reuse for `reuse` eviction: a kind (`reuse`, the zoo's MODEL_NAME/reuse), a zoo
    entry or a folder."""
    per_layer: bool = True
    """Divide the cache evenly among the layers if it holds top_k experts of each; off: all layers
    share it."""
    priority: str = "nearest-layer"
    """Order in which forecast experts are fetched: nearest-layer, push-order, probability,
    probability-over-distance, layer-decay."""
    candidates: str = "named"
    """Experts that forecasts may fetch: named (by a forecast), all (of the forecast layers;
    MoE-Infinity, sequence level, algorithm 1), slots (the first in `priority`, as many as the tier
    has slots; request level, section 5.1)."""
    fill_first_layers: bool = False
    """Begin with the first layers' experts in the computing tier and the next ones in host memory
    (MoE-Infinity, sequence level, section 6.1); off: begin with an empty computing tier."""
    chunked: bool = True
    """In replays, fetch experts linear layer by linear layer (ProMoE, section 5.1). While serving,
    links interrupt any prefetch between two reads, and whole experts are queued."""
    whole_requests: bool = False
    """In chunked replays, fetch the rest of a requested expert in one transfer."""
    least_prefetch: int = 0
    """Least bytes that a prefetch of a chunked replay moves at once; 0: one linear layer."""
    early_preemption: bool = True
    """When a layer's router has run, request all of its experts and drop its other prefetches
    (ProMoE, section 5.2); off: request each expert when it is the next to be computed."""
    reordered: bool = True
    """Compute a layer's experts in order of readiness (ProMoE, section 5.3)."""
    cancel: bool = False
    """A new forecast of a layer cancels prefetches that it does not name, and a router those of
    experts that it did not choose (MoE-Infinity, request level, section 5.1)."""
    lookahead_layers: int | None = None
    """Use forecasts of at most this many layers ahead; 1 is the next layer to be routed
    (MoE-Infinity, request level, section 7.2); null: no limit."""
    hot_first: bool = False
    """Among experts at the same distance, compute and fetch those with the most tokens first
    (Klotski, section 5)."""
    drop_used: bool = False
    """Evict an expert as soon as all tokens have used it, and a forecast one as soon as its layer
    is routed without it, unless the policy keeps it permanently (Klotski, section 5; MoE-Infinity,
    request level, section 7.2)."""
    idle_prefetch: bool = False
    """Use an idle link to fetch the missing expert with the highest score of the eviction policy;
    only `reuse` and `belady` have such scores."""
    hybrid: bool = False
    """Compute a missed expert on the processor where copying it to the accelerator takes longer;
    last bits differ on an accelerator."""
    synchronous: bool = False
    """In replays, compute nothing while the predictor runs (fMoE, section 4.3, on its baselines);
    off: both run at the same time. While serving, nothing is computed meanwhile."""
    adaptive: bool = False
    """Turn prefetching off while measurements show that it slows decoding, and each predictor that
    takes longer than it can save."""
    watchdog_seconds: float = 2.0
    """Transfers that take longer count as hung: their slot is quarantined, their expert read
    again."""

    @property
    def knows_future(self) -> bool:
        """Whether its eviction is given the coming routing: for replays only."""
        return self.eviction == "belady"


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    name: str = "local"
    """Short name, as in `hardware=NAME`."""
    source: str = "measured on this machine"
    """Source of the figures."""
    measured: bool = True
    """Measure this machine and this model; the other fields are then not used."""
    link_bytes_per_second: float = 0.0
    """Bandwidth of the link to the compute device."""
    link_latency_us: float = 0.0
    """Latency of the link per chunk."""
    store_bytes_per_second: float = 0.0
    """Bandwidth of the disk below host memory; 0: unlimited."""
    store_latency_us: float = 0.0
    """Latency of the disk per chunk."""
    host_bytes: float = 0.0
    """Host memory for experts, between disk and device; 0: no such tier."""
    memory_bytes_per_second: float = 0.0
    """Bandwidth at which the compute device reads weights."""
    flops: float = 0.0
    """Dense FLOP/s in the weights' dtype."""
    host_memory_bytes_per_second: float = 0.0
    """Bandwidth of host memory, which copies to the device use too; 0: unknown, `system.hybrid` is
    refused."""
    host_flops: float = 0.0
    """Dense FLOP/s of the host's processor."""
    kernel_us: float = 0.0
    """Launch overhead of one kernel."""
    predictor_us: float = 0.0
    """Latency of one prediction of `predictor_kind` for one token, from which those of other kinds
    follow; 0: each kind takes as long as it was measured for a model of this shape."""
    predictor_kind: str = "mlp"
    """Kind of predictor that `predictor_us` is of."""


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """Sizes of the model that a replay simulates; the routing is the trace's."""

    name: str = "trace"
    """Short name, as in `shape=NAME`."""
    source: str = "the traced model's own checkpoint"
    """Source of the figures."""
    num_layers: int = 0
    """Layers with routed experts."""
    num_experts: int = 0
    """Routed experts per layer."""
    top_k: int = 0
    """Experts that each token is routed to."""
    hidden_size: int = 0
    """Width of the hidden state."""
    expert_bytes: int = 0
    """Size of one expert; 0: the traced model's own shape."""
    layer_bytes: int = 0
    """Other weights of one layer (attention, shared experts)."""
    bytes_per_weight: float = 2.0
    """Bytes per weight, of experts and other weights."""

    @property
    def is_own(self) -> bool:
        """True if sizes are read from the traced model."""
        return self.expert_bytes == 0


class PageCache(StrEnum):
    """Use of the operating system's page cache by reads of experts."""

    BYPASS = "bypass"
    """Direct reads past the cache; `drop` where the file system supports none."""
    DROP = "drop"
    """Drop the pages after each read."""
    KEEP = "keep"
    """Keep the pages: fast where the checkpoint fits in memory, but that memory is not part of the
    budget."""


class Quantise(StrEnum):
    """The types that `moecast pack` quantises experts to: GGUF's, and HQQ."""

    NONE = "none"
    INT8 = "int8"
    """q8_0."""
    INT4 = "int4"
    """q4_K."""
    Q8_0 = "q8_0"
    Q6_K = "q6_K"
    Q5_K = "q5_K"
    Q4_K = "q4_K"
    Q4_1 = "q4_1"
    Q4_0 = "q4_0"
    IQ4_XS = "iq4_xs"
    MXFP4 = "mxfp4"
    Q3_K = "q3_K"
    Q2_K = "q2_K"
    HQQ = "hqq"


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    path: Path | None = None
    """Folder of a packed store (`moecast pack`); none: read the checkpoint in place."""
    page_cache: PageCache = PageCache.BYPASS
    """bypass: direct reads; drop: drop pages after reads; keep: use memory beyond the budget."""


@dataclass(frozen=True, kw_only=True)
class PackConfig(RunConfig):
    model: ModelConfig = chosen(ModelConfig, "model", REFERENCE_MODEL)
    output: Path
    """Folder to create; an interrupted run continues where it stopped."""
    quantise: Quantise = Quantise.NONE
    """Quantise experts to a type of GGUF, which is multiplied as it is stored, or to hqq (Klotski,
    section 7), which is decoded before each use; int8 is q8_0, int4 is q4_K; outputs change."""
    group_size: int | None = None
    """Weights that share a scale, of hqq; none: 64."""
    overwrite: bool = False
    """Replace an existing store at `output` atomically, when the new one is complete."""
    dense_output: Path | None = None
    """Folder for the model without its experts: with the store it can be served without the
    checkpoint."""

    def __post_init__(self) -> None:
        if self.group_size is not None and (self.group_size < 8 or self.group_size % 2):
            raise MoecastError(f"group_size={self.group_size}: must be even and at least 8")
        if self.group_size is not None and self.quantise is not Quantise.HQQ:
            raise MoecastError(
                f"group_size={self.group_size}: quantise={self.quantise.value} has blocks of its "
                "own; leave group_size out, or choose quantise=hqq"
            )


@dataclass(frozen=True, kw_only=True)
class ServedConfig(RunConfig):
    """Settings of all commands that serve a model."""

    model: ModelConfig = chosen(ModelConfig, "model", REFERENCE_MODEL)
    system: SystemConfig = chosen(SystemConfig, "system", "moecast")
    store: StoreConfig = field(default_factory=StoreConfig)
    predictor: str | None = None
    """Kind (stride), zoo entry (NAME, NAME@ALIAS, NAME@DIGEST), folder of an entry, or run folder
    of `moecast train`; none: the system's default."""
    device: str = "auto"
    """Device of the model: auto (a GPU if there is one), cpu, cuda, xpu, mps, cuda:1."""
    devices: list[str] = field(default_factory=list)
    """Devices to distribute experts over (cuda:0,cuda:1), in place of `device`."""
    host_budget: str | None = None
    """Host memory for experts below a device; none: all experts if memory is free."""
    trace_events: Path | None = None
    """File for a Chrome trace (ui.perfetto.dev); none: no trace."""
    learned: Path | None = None
    """Folder in which what the predictor learns while serving is kept; none: not kept."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ServedConfig):
    budget: str = AUTO
    """Memory for experts: auto (all, or what free memory allows), a size (4GiB), or a share of all
    experts (50% or 0.5)."""
    prompt: str = "The heart pumps blood"
    """Text to continue."""
    max_new_tokens: int = 64
    """Most tokens to generate."""
    temperature: float = 0.0
    """0: greedy; above: sampled, by `seed`."""
    draft: str | None = None
    """Verify drafted tokens, several in a step, where that pays: prompt-lookup (what followed the
    same text before), or a small model with the same tokenizer (a folder, or ORG/NAME). Last bits
    may differ."""
    verify: bool = False
    """Compare the tokens with plain Transformers, which needs memory for all experts."""
    routing: Path | None = None
    """Routing log (as `collect import` reads it), whose experts take the place of the routers'
    choice; the text is then meaningless."""

    def __post_init__(self) -> None:
        require_at_least(self, max_new_tokens=1)
        check_sampling(self.temperature)
        if not self.prompt:
            raise MoecastError("prompt is empty: give a text to continue")


class VerifyReference(StrEnum):
    """Reference that `verify` compares with."""

    PLAIN = "plain"
    LAZY = "lazy"


@dataclass(frozen=True, kw_only=True)
class VerifyModelConfig(ServedConfig):
    budget: list[str] = field(default_factory=lambda: ["15%", "50%", "100%"])
    """Budgets to try: sizes (4GiB), or shares of all experts (50%)."""
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
    """plain: all experts in memory; lazy: one expert at a time, for models that do not fit."""

    def __post_init__(self) -> None:
        require_at_least(self, max_new_tokens=1)
        if not self.budget or not self.prompts:
            raise MoecastError("budget and prompts must not be empty")


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(RunConfig):
    model: ModelConfig = chosen(ModelConfig, "model", REFERENCE_MODEL)
    predictor: str | None = None
    """Zoo entry or folder for the budget sweep; none: as the model is served."""
    draft: str | None = None
    """Draft model to count, too."""
    budget: list[str] = field(default_factory=lambda: ["10%", "25%", "50%", "75%", "100%"])
    """Budgets to sweep."""
    seconds: float = 8.0
    """Maximum time to record routing."""
    config_only: bool = False
    """Plan from config.json alone: parameters, bytes in each format, budgets and a bound on
    TPOT."""
    digests: bool = False
    """Hash all weights files and compare with the digests of their origin."""

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise MoecastError(f"seconds={self.seconds}: must be above 0")


@dataclass(frozen=True, kw_only=True)
class InflateConfig(RunConfig):
    model: ModelConfig = chosen(ModelConfig, "model", REFERENCE_MODEL)
    """Experts are stored in its dtype: a slot then has as many bytes as the file."""
    output: Path
    """Folder for the new checkpoint."""
    expert_size: str | None = None
    """Minimum size of each expert (8MiB); rounded up to whole neurons."""
    total_size: str | None = None
    """Minimum size of all experts together (2GiB), in place of `expert_size`."""

    def __post_init__(self) -> None:
        if (self.expert_size is None) == (self.total_size is None):
            raise MoecastError(
                f"expert_size={self.expert_size}, total_size={self.total_size}: give one of them, "
                "for example expert_size=8MiB"
            )


@dataclass(frozen=True, kw_only=True)
class PullForSystemConfig(PullConfig):
    system: SystemConfig = chosen(SystemConfig, "system", "moecast")
    """The system whose predictors are pulled where `name` is a model's."""
