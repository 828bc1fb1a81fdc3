"""Batches in groups, live and simulated: klotski's figures 12, 14 and 15 and its table 3.

    python -m runtime inflate total_size=2GiB output=runs/inflated
    python -m benchmarks.peers.environments only=accelerate
    python -m benchmarks.klotski.run model=runs/inflated trace=runs/traces/qwen2-moe-tiny/NAME
        output=benchmarks/results/klotski.json

Options: `budget=25%`, `batch_size=16` and `n=8` of the ablation and the required figure,
`sizes=4,16` and `groups=1,2,4,8` of figure 14, `prompt_tokens=16`, `new_tokens=12`,
`repetitions=1`, `threads=2`, `page=runs/klotski` (the page with its figures), `work=runs/peers`
(Accelerate's environment and weights), `peer=false` (leaves Accelerate out; it needs the `dev`
extra, Linux and root). Without `trace` nothing is simulated and no quality measured. Some ten
minutes on two cores of a quiet machine.
"""

import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.klotski.live import Setting, accelerate, arms, check
from benchmarks.klotski.page import beside, page_of
from benchmarks.machine import machine

BASE, OURS = "single batch, on demand", "+ order (klotski)"


def whole_numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def decode_rate(row: dict[str, Any]) -> float:
    """Tokens a second in the steady state, where every row has one in each step."""
    return row["batch_size"] * row["n"] * (len(row["steps"]) - 1) / row["steady"]["seconds"]


def figures_of(live: list[dict[str, Any]], peer: dict[str, Any] | None) -> dict[str, Any]:
    """What the issue asks for, as far as it was measured; null where it was not."""
    rows = {row["name"]: row for row in live if not row.get("failed")}
    base, ours = rows.get(BASE), rows.get(OURS)
    if base is None or ours is None:
        return {}
    steady = ours["steady"]
    other = peer.get("tokens_per_second") if peer else None
    return {
        "n": ours["n"],
        "batch_size": ours["batch_size"],
        "over_single_batch_on_demand": median(
            fast / slow for fast, slow in zip(ours["speeds"], base["speeds"], strict=True)
        ),
        "decode_over_single_batch_on_demand": decode_rate(ours) / decode_rate(base),
        "over_accelerate": ours["tokens_per_second"] / other if other else None,
        "busiest_share": max(steady["link"], steady["compute"]),
        "link_share": steady["link"],
        "compute_share": steady["compute"],
        "both_idle_share": steady["both_idle"],
        "reads_of_an_expert_per_step": max(
            row["reads_per_step"]["most"] for row in rows.values() if row["arm"] == "klotski"
        ),
        "beside_weights_and_budget_bytes": beside(ours),
    }


def main(arguments: dict[str, str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    started = time.monotonic()
    threads = int(arguments.get("threads", os.cpu_count() or 1))
    described = machine(threads)
    setting = Setting(
        model=Path(arguments["model"]),
        budget=arguments.get("budget", "25%"),
        prompt_tokens=int(arguments.get("prompt_tokens", 16)),
        new_tokens=int(arguments.get("new_tokens", 12)),
        batch_size=int(arguments.get("batch_size", 16)),
        n=int(arguments.get("n", 8)),
        sizes=whole_numbers(arguments.get("sizes", "4,16")),
        groups=whole_numbers(arguments.get("groups", "1,2,4,8")),
        threads=threads,
        repetitions=int(arguments.get("repetitions", 1)),
        work=Path(arguments.get("work", "runs/peers")),
    )
    live = arms(setting, console)
    equal = check(live)
    peer = accelerate(setting, console) if arguments.get("peer", "true") == "true" else None
    simulated, quality = None, None
    if "trace" in arguments:
        # Here, because these import what training needs.
        from benchmarks.klotski.quality import quality as measured_quality
        from benchmarks.klotski.simulated import simulated as simulate

        trace = Path(arguments["trace"])
        quality, simulated = measured_quality(trace), simulate(trace, console)
    results = {
        "model": setting.model.name,
        "budget": setting.budget,
        "prompt_tokens": setting.prompt_tokens,
        "new_tokens": setting.new_tokens,
        "repetitions": setting.repetitions,
        "machine": described,
        "tokens_equal": equal,
        "figures": figures_of(live, peer),
        "live": live,
        "accelerate": peer,
        "simulated": simulated,
        "quality": quality,
        "seconds": round(time.monotonic() - started),
    }
    page = page_of(results).write(Path(arguments.get("page", "runs/klotski")))
    # The page's CSVs have the samples; what is committed stays small.
    for row in live:
        row.pop("memory", None)
        row.pop("timeline", None)
    Path(arguments["output"]).write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    console.print(json.dumps(results["figures"], indent=1), markup=False)
    console.print(str(page))


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
