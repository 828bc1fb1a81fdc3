"""Batch groups, live and simulated: Klotski's figure 14 and its table 3.

Some ten minutes on two cores of a quiet machine. Needs a model of `python -m runtime inflate`.
"""

import time

from benchmarks.klotski.config import KlotskiConfig
from benchmarks.klotski.live import run_live
from benchmarks.reports import describe_machine, write_report


def run_klotski(config: KlotskiConfig) -> None:
    started = time.monotonic()
    machine = describe_machine(config.threads)
    live = run_live(config)
    # These import the training packages.
    from benchmarks.klotski.quality import measure_quality
    from benchmarks.klotski.simulated import simulate

    quality, simulated = measure_quality(config.trace), simulate(config.trace)
    write_report(
        config,
        model=config.model.name,
        new_tokens=config.max_new_tokens,
        machine=machine,
        tokens_equal=True,
        live=live,
        simulated=simulated,
        quality=quality,
        seconds=round(time.monotonic() - started),
    )
