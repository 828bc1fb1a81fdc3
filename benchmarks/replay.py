"""What prefetching is worth where experts have a real size: held-out requests on simulated time."""

import json
import sys
from pathlib import Path
from typing import Any

from collect.traces import Trace
from configs.compose import compose_typed
from predictors.base import Predictor
from runtime.config import SystemConfig
from runtime.sim.hardware import described
from train.replay import budget_slots, fetch_table, first_tokens
from zoo import load_predictor

BUDGETS = ("15%", "25%", "50%", "75%")
NEW_TOKENS = 500
ON_DEMAND = SystemConfig(
    name="on-demand", prefetch=False, chunked=False, early_preemption=False, reordered=False
)
NO_PREFETCH = SystemConfig(name="promoe without prefetch", prefetch=False)


def main(arguments: dict[str, str]) -> None:
    trace = Trace.open(Path(arguments["trace"]))
    config, _ = compose_typed("train", [f"hardware={arguments['hardware']}"])
    hardware = described(config.hardware, config.shape)
    arms: list[tuple[str, SystemConfig, Predictor | None]] = [
        ("on-demand", ON_DEMAND, None),
        ("promoe, no prefetch", NO_PREFETCH, None),
    ]
    for name in ("mlp", "stride"):
        predictor = load_predictor(f"qwen2-moe-tiny/{name}", spec=trace.spec)
        arms.append((f"promoe, {name}", SystemConfig(), predictor))
    rows: list[dict[str, Any]] = []
    for budget in BUDGETS:
        slots = budget_slots(budget, trace.spec, hardware)
        for name, system, predictor in arms:
            table = fetch_table(
                first_tokens(trace.steps("held_out"), NEW_TOKENS),
                predictor,
                system=system,
                hardware=hardware,
                spec=trace.spec,
                slots=slots,
            )
            rows.append({"budget": budget, "arm": name, **table["replay"]})
    report = {
        "hardware": vars(config.hardware),
        "trace": trace.digest,
        "new_tokens": NEW_TOKENS,
        "rows": rows,
    }
    Path(arguments["output"]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
