"""Two processes that compute on the same cores: what they cost each other, by how threads wait.

    python -m benchmarks.beside output=benchmarks/results/beside.json

Each process serves the reference model and generates, alone and beside another one like it. Threads
of OpenMP wait for each other spinning, unless OMP_WAIT_POLICY=passive has them sleep: a thread that
spins holds a core that the other process's thread needs. `repetitions=3` of each arm, in turns.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[1]
NEW_TOKENS = 24
ROUNDS = 3
"""Of a process, behind one to warm up; the median counts."""
VARIABLE = "OMP_WAIT_POLICY"
POLICIES = ("default", "passive")
TOGETHER = (1, 2)
CHILD = f"""
import statistics, time
import torch
from runtime.engine.loading import load
model = load("qwen2-moe-tiny", budget="25%")
tokens = torch.arange(1, 33)[None]
def seconds():
    start = time.perf_counter()
    model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
        max_new_tokens={NEW_TOKENS}, min_new_tokens={NEW_TOKENS},
    )
    return (time.perf_counter() - start) / {NEW_TOKENS}
seconds()
print(statistics.median(seconds() for _ in range({ROUNDS})))
model.moecast.close()
"""


def token_seconds(policy: str, together: int) -> float:
    """Of so many processes at once, the mean of each one's time of a token."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if policy != "default":
        environment[VARIABLE] = policy
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(together)
    ]
    found = []
    for child in children:
        out, errors = child.communicate(timeout=600)
        if child.returncode:
            raise RuntimeError(errors[-2000:])
        found.append(float(out.splitlines()[-1]))
    return statistics.mean(found)


def main(arguments: dict[str, str]) -> None:
    described = machine(os.cpu_count() or 1)
    repetitions = int(arguments.get("repetitions", 3))
    arms = [(policy, together) for together in TOGETHER for policy in POLICIES]
    measured: dict[tuple[str, int], list[float]] = {arm: [] for arm in arms}
    for _ in range(repetitions):
        for arm in arms:
            measured[arm].append(token_seconds(*arm))
            sys.stdout.write(f"{arm[0]}, {arm[1]} at once: {1e3 * measured[arm][-1]:.1f} ms\n")
            sys.stdout.flush()
    report: dict[str, Any] = {
        "command": f"python -m benchmarks.beside repetitions={repetitions} output=...",
        "machine": described,
        "what": f"reference model, budget 25%, {NEW_TOKENS} tokens; seconds of a token",
        "arms": [
            {
                "policy": policy,
                "processes": together,
                "token_seconds": statistics.median(values),
                "every": values,
            }
            for (policy, together), values in measured.items()
        ],
    }
    Path(arguments["output"]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
