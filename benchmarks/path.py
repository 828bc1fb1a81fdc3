"""The reference model end to end: scores of its predictors, and live runs at several budgets."""

import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from runtime import load
from runtime.config import BUILTIN_MODELS, ModelConfig, SystemConfig
from runtime.plain import load_plain

MODEL = ModelConfig(dtype="float32")
FOLDER = BUILTIN_MODELS / "qwen2_moe_tiny"
PREDICTOR = "qwen2-moe-tiny/mlp"
BUDGETS = ("15%", "25%", "50%", "75%", "100%")
ON_DEMAND = SystemConfig(
    name="on-demand", prefetch=False, chunked=False, early_preemption=False, reordered=False
)
SYSTEMS = (ON_DEMAND, SystemConfig(name="promoe"))
REPETITIONS = 3
NEW_TOKENS = 64
PROMPTS = (
    "The heart pumps blood through the body, and the lungs",
    "It was late in the evening when the old man came to the door and",
    "def and class statements bind names in the current namespace. A class",
)


def generate(model, tokens: list[int]) -> list[int]:
    """Greedy continuation, prompt included."""
    inputs = torch.tensor([tokens])
    output = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return output[0].tolist()


def live(system: SystemConfig, budget: str, prompts: list[list[int]]) -> dict[str, Any]:
    """One load, all prompts one after another."""
    predictor = PREDICTOR if system.prefetch else None
    model = load(MODEL, predictor=predictor, budget=budget, system=system)
    with model.moecast as handle:
        outputs = [generate(model, tokens) for tokens in prompts]
        return {"outputs": outputs, **handle.stats()}


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    cpu = next(
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_average_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def main(arguments: dict[str, str]) -> None:
    described = machine()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    plain = load_plain(FOLDER, dtype=torch.float32)
    expected = [generate(plain, tokens) for tokens in prompts]
    del plain
    kept = ("tpot_seconds", "ttft_seconds", "hit_rate", "fetch_rate", "joint_rate")
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(REPETITIONS):
        for budget in BUDGETS:
            for system in SYSTEMS:
                result = live(system, budget, prompts)
                assert result["outputs"] == expected, (system.name, budget)
                runs.setdefault((budget, system.name), []).append(result)
    rows = []
    for (budget, name), results in runs.items():
        row: dict[str, Any] = {"budget": budget, "system": name, "tokens_equal": True}
        for key in (*kept, "stall_seconds", "bytes_moved", "bytes_wasted", "arena_bytes"):
            values = [result[key] for result in results if result[key] is not None]
            row[key] = statistics.median(values) if values else None
        rows.append(row)
    trained = json.loads(Path(arguments["train"]).read_text())
    audit = json.loads((FOLDER / "audit.json").read_text())
    report = {
        "machine": described,
        "repetitions": REPETITIONS,
        "new_tokens": NEW_TOKENS * len(PROMPTS),
        "live": rows,
        "train": {
            key: trained[key] for key in ("setting", "trace", "training", "parity", "seconds")
        },
        "predictors": trained["predictors"],
        "reference_model": audit,
    }
    Path(arguments["output"]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
