"""Rows of the peers, made from their runs."""

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

SAME = "yes"


@dataclass(frozen=True, kw_only=True)
class PeerAnswer:
    """One answer of a worker."""

    tokens: list[int]
    seconds: list[float]
    """Time of each token since the prompt."""
    read_bytes: list[int]
    """Bytes read from the disk since the prompt, at each token."""

    @property
    def tpots(self) -> list[float]:
        """Seconds between tokens."""
        return [
            later - earlier for earlier, later in zip(self.seconds, self.seconds[1:], strict=False)
        ]


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """One run: the worker's report, and its memory."""

    versions: dict[str, str]
    load_seconds: float
    answers: list[PeerAnswer]
    peak_resident_bytes: int
    peak_anonymous_bytes: int
    peak_cached_bytes: int
    """Pages of its weights in the page cache."""
    peak_charged_bytes: int
    mean_charged_bytes: float
    limiter_busy_seconds: float
    """CPU time that the limiter took from the machine."""

    @property
    def tpots(self) -> list[float]:
        return [seconds for answer in self.answers for seconds in answer.tpots]

    @property
    def tokens_per_second(self) -> float:
        """Decode throughput: the inverse of the mean time of a token after the first."""
        return 1 / statistics.fmean(self.tpots)

    @property
    def read_bytes_per_token(self) -> float:
        """Bytes read from the disk for each token after the first."""
        total = sum(answer.read_bytes[-1] - answer.read_bytes[0] for answer in self.answers)
        return total / len(self.tpots)


@dataclass(frozen=True, kw_only=True)
class PeerKey:
    peer: str
    how: str
    budget: str
    budget_bytes: int
    limit_bytes: int
    reserved_bytes: int
    """Part of the limit that weights in the page cache cannot use."""
    threads: int
    read_ahead_kib: int | None
    """The disk's read-ahead; None for a program that reads past the page cache."""


@dataclass(frozen=True, kw_only=True)
class FailedPeer(PeerKey):
    """A peer without figures."""

    cannot_run: str


@dataclass(frozen=True, kw_only=True)
class PeerRow(PeerKey):
    """Medians over the runs of one peer."""

    runs: int
    ttft_seconds: float
    tpot_seconds: float
    tokens_per_second: float
    tokens_per_second_range: tuple[float, float]
    new_tokens: int
    read_bytes_per_token: float
    read_bytes_prefill: float
    load_seconds: float
    peak_resident_bytes: int
    peak_anonymous_bytes: int
    peak_cached_bytes: int
    peak_charged_bytes: int
    mean_charged_bytes: float
    limiter_busy_seconds: float
    tokens_as_transformers: str | None
    """`yes`, or the first token that differs; None where programs round differently."""
    versions: dict[str, str]
    over_reference: float | None = None
    """Decode throughput over that of the reference's fastest row at the same budget."""


def first_difference(answers: Sequence[list[int]], expected: Sequence[list[int]]) -> str:
    """Returns `yes`, or the first token that differs; an answer may end early."""
    for number, (tokens, reference) in enumerate(zip(answers, expected, strict=True)):
        for position, (token, right) in enumerate(zip(tokens, reference, strict=False)):
            if token != right:
                return f"prompt {number}, token {position} of {len(reference)}"
    return SAME


def summarize_runs(
    key: PeerKey, runs: Sequence[PeerRun], expected: list[list[int]] | None
) -> PeerRow:
    """Returns medians over the runs, with the lowest and the highest decode throughput.

    Args:
        expected: The answers of Transformers; None if others can be right.
    """

    def median(figure: Callable[[PeerRun], float]) -> float:
        return statistics.median(figure(run) for run in runs)

    speeds = [run.tokens_per_second for run in runs]
    equal = None
    if expected is not None:
        texts = [
            first_difference([answer.tokens for answer in run.answers], expected) for run in runs
        ]
        equal = next((text for text in texts if text != SAME), SAME)
    return PeerRow(
        **vars(key),
        runs=len(runs),
        ttft_seconds=median(lambda run: statistics.median(a.seconds[0] for a in run.answers)),
        tpot_seconds=median(lambda run: statistics.median(run.tpots)),
        tokens_per_second=statistics.median(speeds),
        tokens_per_second_range=(min(speeds), max(speeds)),
        new_tokens=min(sum(len(answer.tokens) for answer in run.answers) for run in runs),
        read_bytes_per_token=median(lambda run: run.read_bytes_per_token),
        read_bytes_prefill=median(
            lambda run: statistics.median(a.read_bytes[0] for a in run.answers)
        ),
        load_seconds=median(lambda run: run.load_seconds),
        peak_resident_bytes=max(run.peak_resident_bytes for run in runs),
        peak_anonymous_bytes=max(run.peak_anonymous_bytes for run in runs),
        peak_cached_bytes=max(run.peak_cached_bytes for run in runs),
        peak_charged_bytes=max(run.peak_charged_bytes for run in runs),
        mean_charged_bytes=median(lambda run: run.mean_charged_bytes),
        limiter_busy_seconds=median(lambda run: run.limiter_busy_seconds),
        tokens_as_transformers=equal,
        versions=runs[0].versions,
    )


def add_ratios(
    rows: Sequence[PeerRow | FailedPeer], references: Collection[str]
) -> list[PeerRow | FailedPeer]:
    """Adds each row's throughput over that of the references' fastest row at the same budget."""
    base: dict[str, float] = {}
    for row in rows:
        if isinstance(row, PeerRow) and row.peer in references:
            base[row.budget] = max(base.get(row.budget, 0.0), row.tokens_per_second)
    return [
        replace(row, over_reference=row.tokens_per_second / base[row.budget])
        if isinstance(row, PeerRow) and row.budget in base
        else row
        for row in rows
    ]
