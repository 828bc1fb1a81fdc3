"""Requests, rows and the report of the batch benchmark."""

from dataclasses import dataclass

from benchmarks.reports import MachineFacts


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

    @property
    def extra_bytes(self) -> int:
        """Peak memory on top of weights and budget."""
        return self.peak_memory_bytes - self.weights_bytes - self.arena_bytes


@dataclass(frozen=True, kw_only=True)
class LiveRow(VariantRequest, VariantFigures):
    """The median throughput of a variant; all else is of the run with the lower median."""

    name: str
    speeds: list[float]
    """Throughput of each run."""

    @property
    def decode_tokens_per_second(self) -> float:
        """Throughput in the steady state, where every request has a token in each step."""
        return self.batch_size * self.n * (len(self.steps) - 1) / self.steady.seconds


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


@dataclass(frozen=True, kw_only=True)
class KlotskiFigures:
    """Ratios of the variants."""

    n: int
    batch_size: int
    over_single_batch_on_demand: float
    """Ratio of throughputs, median over the repetitions."""
    decode_over_single_batch_on_demand: float
    busiest_share: float
    """Share of the steady state in which the busier of link and computation is busy."""
    link_share: float
    compute_share: float
    both_idle_share: float
    reads_of_an_expert_per_step: int
    extra_bytes: int
    """Peak memory on top of weights and budget."""


@dataclass(frozen=True, kw_only=True)
class KlotskiReport:
    model: str
    budget: str
    prompt_tokens: int
    new_tokens: int
    repetitions: int
    machine: MachineFacts
    tokens_equal: bool
    figures: KlotskiFigures | None
    live: list[LiveRow | FailedRow]
    simulated: list[SimulatedRow]
    quality: list[QualityRow]
    seconds: float

    @property
    def completed(self) -> list[LiveRow]:
        """The variants with figures."""
        return [row for row in self.live if isinstance(row, LiveRow)]


Point = tuple[int, int, float]
"""Batch size, batches of a group, tokens/s."""


def live_points(rows: list[LiveRow]) -> list[Point]:
    """Returns Klotski's throughput by batch size and n, with the KV cache in memory."""
    return sorted(
        (row.batch_size, row.n, row.tokens_per_second)
        for row in rows
        if row.variant == "klotski" and row.kv_budget is None
    )


def simulated_points(rows: list[SimulatedRow]) -> dict[str, list[Point]]:
    """Returns Klotski's simulated throughput by batch size and n for each environment."""
    points: dict[str, list[Point]] = {}
    for row in rows:
        if row.system == "klotski":
            points.setdefault(row.environment, []).append((row.batch, row.n, row.tokens_per_second))
    return points
