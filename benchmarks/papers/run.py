"""Comparison of the papers' published numbers with replays of the same shapes, links and budgets.

The routing is the reference model's; `paper_context.py` describes how it is folded to other models'
numbers of experts. Numbers are those that the papers' text and tables give: what a figure shows
only as a drawing is not quoted. One process, about ten minutes on one core.
"""

import time

from benchmarks.config import PapersConfig
from benchmarks.papers import fmoe, klotski, moe_infinity, promoe
from benchmarks.papers.claims import Claim, Figures, PapersReport, ReplayCell
from benchmarks.papers.paper_context import PaperContext
from benchmarks.reports import print_line, write_report
from predictors.errors import MoecastError, unknown

PAPERS: dict[str, Figures] = {
    module.PAPER: module.FIGURES for module in (promoe, fmoe, moe_infinity, klotski)
}


def run_papers(config: PapersConfig) -> None:
    if config.paper is not None and config.paper not in PAPERS:
        raise MoecastError(unknown("paper", config.paper, PAPERS))
    started = time.monotonic()
    context = PaperContext(config.trace, entries=config.entries, new_tokens=config.replay_tokens)
    claims: list[Claim] = []
    cells: list[ReplayCell] = []
    for paper, figures in PAPERS.items():
        if config.paper not in (None, paper):
            continue
        for name, replay_figure in figures:
            figure = replay_figure(context)
            claims += figure.claims
            cells += figure.cells
            print_line(f"{time.monotonic() - started:5.0f} s  {paper} {name}")
    report = PapersReport(
        trace=context.trace.digest,
        model=context.trace.spec.as_dict(),
        new_tokens=context.new_tokens,
        seconds=round(time.monotonic() - started),
        claims=claims,
        cells=cells,
    )
    write_report(config, report)
