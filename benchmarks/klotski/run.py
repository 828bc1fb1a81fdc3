"""Batch groups, live and simulated: Klotski's figure 14 and its table 3.

Some ten minutes on two cores of a quiet machine. Needs a model of `python -m runtime inflate`.
"""

import time
from collections.abc import Sequence
from statistics import median

from benchmarks.klotski.config import KlotskiConfig
from benchmarks.klotski.live import run_live
from benchmarks.klotski.rows import (
    FailedRow,
    KlotskiFigures,
    KlotskiReport,
    LiveRow,
)
from benchmarks.reports import describe_machine, make_report, print_line, write_report

BASE, OURS = "single batch, on demand", "+ order (klotski)"


def summarize(live: Sequence[LiveRow | FailedRow]) -> KlotskiFigures | None:
    """Returns the ratios of the variants; None if the baseline or Klotski failed."""
    rows = {row.name: row for row in live if isinstance(row, LiveRow)}
    base, ours = rows.get(BASE), rows.get(OURS)
    if base is None or ours is None:
        return None
    ratios = [fast / slow for fast, slow in zip(ours.speeds, base.speeds, strict=True)]
    return KlotskiFigures(
        n=ours.n,
        batch_size=ours.batch_size,
        over_single_batch_on_demand=median(ratios),
        decode_over_single_batch_on_demand=(
            ours.decode_tokens_per_second / base.decode_tokens_per_second
        ),
        busiest_share=max(ours.steady.link, ours.steady.compute),
        link_share=ours.steady.link,
        compute_share=ours.steady.compute,
        both_idle_share=ours.steady.both_idle,
        reads_of_an_expert_per_step=max(
            row.reads_per_step.most for row in rows.values() if row.variant == "klotski"
        ),
        extra_bytes=ours.extra_bytes,
    )


def run_klotski(config: KlotskiConfig) -> None:
    started = time.monotonic()
    machine = describe_machine(config.threads)
    live = run_live(config)
    # These import the training packages.
    from benchmarks.klotski.quality import measure_quality
    from benchmarks.klotski.simulated import simulate

    quality, simulated = measure_quality(config.trace), simulate(config.trace)
    report = make_report(
        KlotskiReport,
        config,
        model=config.model.name,
        new_tokens=config.max_new_tokens,
        machine=machine,
        tokens_equal=True,
        figures=summarize(live),
        live=live,
        simulated=simulated,
        quality=quality,
        seconds=round(time.monotonic() - started),
    )
    write_report(config, report)
    print_line(str(report.figures))
