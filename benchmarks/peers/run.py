"""Serving engines side by side: same weights, prompts, memory and machine, interleaved in one run.

    python -m runtime inflate total_size=2GiB output=runs/inflated-2g
    python -m benchmarks.peers.environments
    python -m benchmarks.peers.run model=runs/inflated-2g output=benchmarks/results/peers.json

Options: `budgets=25%,50%`, `repetitions=3`, `new_tokens=24`, `seconds_per_prompt=4`,
`only=moecast,accelerate`, `threads=2`, `entries=FOLDER` (predictors that are not in the zoo),
`work=runs/peers` (environments, other layouts of the weights, logs). Needs the `dev` extra, Linux
6.5 and root (`limit.py` says why).

Memory is the same for all: weights outside of experts + budget for experts + 400 MiB. Weights are
in float32 everywhere, and so is arithmetic. An answer that takes longer than `seconds_per_prompt`
ends early; a peer that cannot run is a row that says why.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer

from benchmarks.machine import machine
from benchmarks.peers.figures import row
from benchmarks.peers.fused import Checkpoint, write_fused
from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.peers import PEERS, Peer, Weights
from benchmarks.peers.table import markdown
from benchmarks.peers.trial import CannotRun, Place, Questions, prepare, run
from runtime.budget import Budget
from runtime.engine.plain import load_plain

ALLOWANCE_BYTES = 400 * 2**20
"""Beside weights and budget: an interpreter with PyTorch, activations, keys and values; learned
predictors with onnxruntime take most of it. Who needs less has the rest as page cache."""
REFERENCE = "accelerate"
"""Whose decode speed the others' is a multiple of."""
PROMPTS = (
    "The heart pumps blood through the body, and the lungs",
    "It was late in the evening when the old man came to the door and",
    "def and class statements bind names in the current namespace. A class",
)


def layouts(model: Path, work: Path, console: Console) -> dict[Weights, Path]:
    """The weights in every layout, written where they are not there yet."""
    fused, gguf = work / "weights" / model.name, work / "weights" / f"{model.name}.gguf"
    for path, write, source in ((fused, write_fused, model), (gguf, write_gguf, fused)):
        if not path.exists():
            console.print(f"writing {path}")
            path.parent.mkdir(parents=True, exist_ok=True)
            # Under another name until it is whole.
            partial = path.with_name(f"{path.name}.partial.{os.getpid()}")
            write(source, partial)
            partial.rename(path)
    return {Weights.SEPARATE: model, Weights.FUSED: fused, Weights.GGUF: gguf}


def sizes(fused: Path) -> tuple[int, int]:
    """Bytes of all experts, and of all other weights."""
    checkpoint = Checkpoint(fused)
    experts = others = 0
    for key in checkpoint:
        num_bytes = checkpoint[key].nbytes
        if ".mlp.experts." in key:
            experts += num_bytes
        else:
            others += num_bytes
    return experts, others


@torch.inference_mode()
def reference(model: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """What plain Transformers with every expert in memory says: greedy, eager experts."""
    plain = load_plain(model, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        inputs = torch.tensor([prompt])
        output = plain.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def compare(
    peers: list[Peer],
    budgets: dict[str, int],
    repetitions: int,
    others_bytes: int,
    questions: Questions,
    place: Place,
    console: Console,
) -> dict[tuple[str, str], list[dict[str, Any]] | str]:
    """Runs by peer and budget, or why there are none."""
    results: dict[tuple[str, str], list[dict[str, Any]] | str] = {}
    unprepared: dict[str, str] = {}
    for peer in peers:
        try:
            prepare(peer, place)
        except CannotRun as error:
            unprepared[peer.name] = str(error)
    for repetition in range(repetitions):
        for budget, budget_bytes in budgets.items():
            for peer in peers:
                runs = results.setdefault((peer.name, budget), unprepared.get(peer.name, []))
                if isinstance(runs, str):
                    continue
                try:
                    limit = others_bytes + budget_bytes + ALLOWANCE_BYTES
                    done = run(
                        peer, questions, budget_bytes=budget_bytes, limit_bytes=limit, place=place
                    )
                except CannotRun as error:
                    results[peer.name, budget] = str(error)
                    console.print(f"{repetition + 1}/{repetitions} {budget} {peer.name}: {error}")
                    continue
                runs.append(done)
                first = done["answers"][0]["seconds"]
                console.print(
                    f"{repetition + 1}/{repetitions} {budget} {peer.name}: first token after "
                    f"{first[0]:.2f} s, {(len(first) - 1) / (first[-1] - first[0]):.2f} tokens/s"
                )
    return results


def main(arguments: dict[str, str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    started = time.monotonic()
    threads = int(arguments.get("threads", os.cpu_count() or 1))
    described = machine(threads)
    model, work = Path(arguments["model"]), Path(arguments.get("work", "runs/peers"))
    work.mkdir(parents=True, exist_ok=True)
    weights = layouts(model, work, console)
    experts_bytes, others_bytes = sizes(weights[Weights.FUSED])
    names = arguments.get("budgets", "25%,50%").split(",")
    budgets = {name: Budget.parse(name).resolve(total_bytes=experts_bytes) for name in names}
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    new_tokens = int(arguments.get("new_tokens", 24))
    questions = Questions(
        prompts=[tokenizer(prompt)["input_ids"] for prompt in PROMPTS],
        new_tokens=new_tokens,
        seconds_per_prompt=float(arguments.get("seconds_per_prompt", 4)),
        threads=threads,
    )
    only = arguments.get("only", ",".join(peer.name for peer in PEERS)).split(",")
    peers = [peer for peer in PEERS if peer.name in only]
    if "entries" in arguments:
        entries = {"entries": str(Path(arguments["entries"]).absolute())}
        peers = [
            replace(peer, options=peer.options | entries) if peer.environment is None else peer
            for peer in peers
        ]
    expected = reference(model, questions.prompts, new_tokens)
    repetitions = int(arguments.get("repetitions", 3))
    results = compare(
        peers, budgets, repetitions, others_bytes, questions, Place(work, weights), console
    )
    rows: list[dict[str, Any]] = []
    for budget, budget_bytes in budgets.items():
        limit = others_bytes + budget_bytes + ALLOWANCE_BYTES
        for peer in peers:
            runs = results[peer.name, budget]
            figures = {"cannot_run": runs} if isinstance(runs, str) else row(runs, expected)
            rows.append(
                {
                    "peer": peer.name,
                    "how": peer.how,
                    "budget": budget,
                    "budget_bytes": budget_bytes,
                    "limit_bytes": limit,
                    **figures,
                }
            )
    for one in rows:
        base = next((r for r in rows if (r["peer"], r["budget"]) == (REFERENCE, one["budget"])), {})
        if "tokens_per_second" in one and "tokens_per_second" in base:
            one[f"decode_over_{REFERENCE}"] = one["tokens_per_second"] / base["tokens_per_second"]
    report = {
        "machine": described,
        "experts_bytes": experts_bytes,
        "other_weights_bytes": others_bytes,
        "allowance_bytes": ALLOWANCE_BYTES,
        "dtype": "float32",
        "reference_peer": REFERENCE,
        "repetitions": repetitions,
        "prompts": [len(prompt) for prompt in questions.prompts],
        "new_tokens": new_tokens,
        "seconds_per_prompt": questions.seconds_per_prompt,
        "seconds": time.monotonic() - started,
        "rows": rows,
    }
    Path(arguments["output"]).write_text(json.dumps(report, indent=1) + "\n")
    console.print(markdown(report), markup=False)


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
