"""What the papers publish, beside what the simulator gives for the same shapes, links and budgets.

    python -m benchmarks.papers.run trace=runs/traces/qwen2-moe-tiny/NAME entries=runs/all/entries
        output=benchmarks/results/papers.json

The routing is the reference model's (`ground.py` says how it is folded to other models' numbers of
experts); numbers are those that the papers' text and tables give, for what a figure shows only as
a drawing is not quoted. `trace` needs all signals (signals=[layer_input,gate_input,gate_logits,
experts,weights] of `python -m collect`), `entries` the predictors of `python -m train
predictor=all`. Single process; `new_tokens=100` tokens are replayed for each cell, more or less ten
minutes on one core; `paper=NAME` replays one paper's figures.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.papers import fmoe, klotski, moe_infinity, promoe
from benchmarks.papers.ground import Ground

PAPERS = {
    "promoe": promoe.FIGURES,
    "fmoe": fmoe.FIGURES,
    "moe-infinity-request": moe_infinity.FIGURES,
    "klotski": klotski.FIGURES,
}


def main(arguments: dict[str, str]) -> None:
    ground = Ground(
        Path(arguments["trace"]),
        entries=Path(arguments["entries"]) if "entries" in arguments else None,
        new_tokens=int(arguments.get("new_tokens", "100")),
    )
    claims: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    started = time.monotonic()
    for paper, figures in PAPERS.items():
        if arguments.get("paper", paper) != paper:
            continue
        for name, figure in figures:
            part = figure(ground)
            claims += [asdict(claim) for claim in part.claims]
            cells += part.cells
            sys.stderr.write(f"{time.monotonic() - started:5.0f} s  {paper} {name}\n")
    report = {
        "trace": ground.trace.digest,
        "model": ground.trace.spec.as_dict(),
        "new_tokens": ground.new_tokens,
        "seconds": round(time.monotonic() - started),
        "claims": claims,
        "cells": cells,
    }
    Path(arguments["output"]).write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
