"""Rows of the server's benchmarks, whose results are parts of one file."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Resources of the server's process.

    Pages of files (code of libraries) enter resident memory as they are first used, and leave it
    when memory is short; anonymous pages (heap, arenas, stacks) are those that a leak adds to.
    """

    rss_bytes: int
    anonymous_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class ServerExit:
    """The end of the server's process after a signal."""

    seconds: float
    exit_code: int
    children_left: int


@dataclass(frozen=True, kw_only=True)
class ClientResult:
    """One program; `works` is None where it was not run."""

    works: bool | None
    why: str | None = None
    """Why it failed or was not run."""
    version: str | None = None
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FootprintSample(Footprint):
    seconds: float
    """Time since the start."""


@dataclass(kw_only=True)
class HonestCounts:
    """Answers to clients whose questions have known answers."""

    asked: int = 0
    answered: int = 0
    wrong: int = 0
    """Answers that differ from those given to the same question alone."""
    refused: dict[str, int] = field(default_factory=dict)
    """Refusals with Retry-After by status; each was asked again."""
    failed: dict[str, int] = field(default_factory=dict)
    """Anything else by status; `closed` where the connection ended without an answer."""
    seconds_worst: float = 0.0
    """From the first try to the answer."""


@dataclass(frozen=True, kw_only=True)
class HealthReport:
    """GET /health four times a second, each on a new connection."""

    probes: int
    failed: int
    seconds_p99: float
    seconds_worst: float


@dataclass(frozen=True, kw_only=True)
class LimitReport:
    """The memory limit: weights other than experts, the budget and 400 MiB."""

    limit_bytes: int
    peak_anonymous_bytes: int
    """Memory that no file holds."""
    peak_bytes: int
    """Memory with the pages of the weights in the page cache."""
    was_killed: bool


@dataclass(frozen=True, kw_only=True)
class AttackReport:
    minutes: float
    honest: HonestCounts
    hostile: dict[str, dict[str, int]]
    """Answers to each attack."""
    unexpected: int
    """Answers to attacks that are none of those allowed."""
    health: HealthReport
    memory: LimitReport
    before: Footprint
    after: Footprint
    left: dict[str, float]
    """Gauges of the idle server."""
    threads_leaked: int
    descriptors_leaked: int
    ended: ServerExit
    samples: list[FootprintSample]
    """One for each minute."""

    @property
    def is_reached(self) -> bool:
        """Whether every honest request was answered rightly, and the server stayed well."""
        honest = self.honest
        return (
            honest.answered == honest.asked
            and not (honest.wrong or honest.failed or self.unexpected)
            and not (self.health.failed or self.memory.was_killed or any(self.left.values()))
            and self.ended.exit_code == 0
        )


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """The distribution of a latency, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    all: list[float]


@dataclass(frozen=True, kw_only=True)
class CacheCounts:
    """The expert cache's counters during the replays."""

    hits: float
    joins: float
    misses: float
    bytes: float
    stall_seconds: float
    hit_rate: float


@dataclass(frozen=True, kw_only=True)
class SystemLatencies:
    """Latencies of one system over all repetitions."""

    mean_of_each_repetition: list[float]
    """Mean end-to-end seconds."""
    e2e_seconds: Percentiles
    ttft_seconds: Percentiles
    tpot_seconds: Percentiles
    counted: CacheCounts


@dataclass(frozen=True)
class Arrival:
    """A request of a trace."""

    seconds: float
    """Time since the first."""
    prompt_tokens: int
    new_tokens: int
