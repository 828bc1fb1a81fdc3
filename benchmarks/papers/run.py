"""Comparison of the papers' published numbers with replays of the same shapes, links and budgets.

The routing is the reference model's; `paper_context.py` describes how it is folded to other models'
numbers of experts. `published.yaml` has the numbers that the papers' text and tables give. Replays
run in several processes, and a finished one is a file: an interrupted command resumes.
"""

import time
from dataclasses import dataclass

from benchmarks.papers import (
    fmoe,
    klotski,
    moe_infinity_request,
    moe_infinity_sequence,
    promoe,
)
from benchmarks.papers.cells import CellResult, PaperCell, ReplayTable
from benchmarks.papers.claims import Claim, Figures, Interval, interval, make_claims
from benchmarks.papers.config import PapersConfig
from benchmarks.papers.jobs import PaperReplays
from benchmarks.papers.published import find_published, read_published
from benchmarks.reports import describe_machine, print_line, write_report
from benchmarks.tables.markdown import format_interval, format_published
from collect.traces import Trace
from predictors.spec import ModelSpec

PAPERS: dict[str, Figures] = {
    module.PAPER: module.FIGURES
    for module in (promoe, fmoe, moe_infinity_request, moe_infinity_sequence, klotski)
}


@dataclass(frozen=True, kw_only=True)
class ReplayedCellRow:
    """Figures of one replay; times in milliseconds, of the traced model's number of layers.

    Means are over prefills or decode steps; the interval is of the mean, 95 %, over requests.
    """

    system: str
    predictor: str | None
    shape: str
    hardware: str
    share: float
    """Share of all experts that fit."""
    slots: int
    batch: int
    prefills: int
    decode_steps: int
    decode_tokens: int
    ttft_ms: float
    ttft_interval_ms: Interval
    ttft_median_ms: float
    ttft_p95_ms: float
    tpot_ms: float
    tpot_interval_ms: Interval
    tpot_median_ms: float
    tpot_p95_ms: float
    hit_rate: float
    decode_stall_share: float
    prefill_stall_share: float
    decode_bytes_per_token: float
    share_of_least_time: float | None
    """Least time of this machine (`runtime.sim.lower_bound`) over the run's time; None with several
    devices."""


@dataclass(frozen=True, kw_only=True)
class NotReplayed:
    """A published figure that has no replay next to it, and why."""

    paper: str
    where: str
    what: str
    paper_value: float | str
    reason: str


def describe_replay(cell: PaperCell, result: CellResult) -> ReplayedCellRow:
    sums, samples = result.units.sum(), result.units.resample()
    tokens = float(sums.decode_tokens)
    return ReplayedCellRow(
        system=cell.system.name,
        predictor=cell.system.predictor if cell.system.prefetch else None,
        shape=cell.shape.name,
        hardware=cell.hardware.name,
        share=round(cell.share, 4),
        slots=result.slots,
        batch=cell.batch,
        prefills=int(sums.prefills),
        decode_steps=int(sums.decode_steps),
        decode_tokens=int(tokens),
        ttft_ms=1e3 * float(sums.ttft_seconds),
        ttft_interval_ms=interval(1e3 * samples.ttft_seconds),
        ttft_median_ms=1e3 * result.ttft_median,
        ttft_p95_ms=1e3 * result.ttft_p95,
        tpot_ms=1e3 * float(sums.tpot_seconds),
        tpot_interval_ms=interval(1e3 * samples.tpot_seconds),
        tpot_median_ms=1e3 * result.tpot_median,
        tpot_p95_ms=1e3 * result.tpot_p95,
        hit_rate=float(sums.hit_rate),
        decode_stall_share=float(sums.decode_stall_share),
        prefill_stall_share=float(sums.prefill_stall_share),
        decode_bytes_per_token=float(sums.decode_bytes) / tokens,
        share_of_least_time=result.share_of_least_time,
    )


def list_cells(spec: ModelSpec) -> list[PaperCell]:
    """Returns the replays that the papers' figures ask for."""
    table = ReplayTable(spec)
    for paper, figures in PAPERS.items():
        for compare in figures:
            for row in compare(table):
                find_published(paper, row.name)  # before the replays, which take hours
    return table.asked


def compare_figures(spec: ModelSpec, results: dict[str, CellResult]) -> list[Claim]:
    """Returns the claims of all figures with their confidence intervals."""
    sums = ReplayTable(spec, {key: result.units.sum() for key, result in results.items()})
    samples = ReplayTable(spec, {key: result.units.resample() for key, result in results.items()})
    return [
        claim
        for paper, figures in PAPERS.items()
        for compare in figures
        for claim in make_claims(paper, compare(sums), compare(samples))
    ]


def list_not_replayed() -> list[NotReplayed]:
    return [
        NotReplayed(
            paper=figure.paper,
            where=figure.where,
            what=figure.what,
            paper_value=figure.value,
            reason=figure.not_replayed,
        )
        for figure in read_published().values()
        if figure.not_replayed is not None
    ]


def run_papers(config: PapersConfig) -> None:
    started = time.monotonic()
    machine = describe_machine()
    trace = Trace.open(config.trace)
    cells = list_cells(trace.spec)
    results = PaperReplays(trace, config).run(cells)
    claims = compare_figures(trace.spec, results)
    for claim in claims:
        print_line(describe_claim(claim))
    write_report(
        config,
        trace=trace.digest,
        model=trace.spec.as_dict(),
        # Finished replays of an interrupted command took none of it.
        seconds=round(time.monotonic() - started),
        machine=machine,
        claims=claims,
        not_replayed=list_not_replayed(),
        cells=[
            describe_replay(cell, results[digest])
            for digest, cell in {cell.digest(): cell for cell in cells}.items()
        ],
    )


def describe_claim(claim: Claim) -> str:
    """Returns a claim as a line of text."""
    text = f"{claim.paper} {claim.where}: {claim.what}: {format_published(claim.paper_value)}, "
    text += f"replayed {format_interval(claim.ours, claim.low, claim.high)}"
    if claim.change is not None:
        text += f"; {claim.change.what}: {format_published(claim.change.ours)}"
    return text
