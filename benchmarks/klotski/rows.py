"""Requests and rows of the batch benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class VariantRequest:
    """Settings of one live run."""

    model: str
    variant: str
    """One of `variants.VARIANTS`."""
    budget: str
    batch_size: int
    n: int
    """Batches of a group."""
    num_batches: int
    prompt_tokens: int
    new_tokens: int
    threads: int
    kv_budget: str | None = None


@dataclass(frozen=True, kw_only=True)
class SteadyShares:
    """Shares of the time of the decode steps."""

    seconds: float
    link: float
    """Bytes move."""
    compute: float
    """The computation does not wait for bytes."""
    both_idle: float
    bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class ReadsPerStep:
    """Reads of one expert within one step of the group."""

    most: int
    mean: float


@dataclass(frozen=True, kw_only=True)
class VariantFigures:
    """Figures of one live run."""

    tokens: int
    seconds: float
    tokens_per_second: float
    """Prompts included in the time."""
    steps: list[float]
    """Seconds of each step."""
    steady: SteadyShares
    reads_per_step: ReadsPerStep
    bytes_moved: int
    hit_rate: float | None
    arena_bytes: int
    weights_bytes: int
    peak_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class LiveRow(VariantRequest, VariantFigures):
    """The median throughput of a variant; all else is of the run with the lower median."""

    name: str
    speeds: list[float]
    """Throughput of each run."""


@dataclass(frozen=True, kw_only=True)
class FailedRow(VariantRequest):
    """A variant without figures."""

    name: str
    failed: str


@dataclass(frozen=True, kw_only=True)
class SimulatedRow:
    """One point of figure 14."""

    environment: str
    system: str
    batch: int
    n: int
    tokens_per_second: float
    decode_stall_share: float


@dataclass(frozen=True, kw_only=True)
class QualityRow:
    """Attention to sinks and a window, teacher-forced on held-out text."""

    sinks: int | None
    window: int | None
    """None: attention to all tokens."""
    nats: float
    perplexity: float
    same_token_share: float
    """Share of tokens whose most likely successor is that of attention to all tokens."""
    tokens: int
