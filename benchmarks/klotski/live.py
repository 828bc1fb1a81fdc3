"""Live arms on one machine: tokens a second, and whether the pipeline is full (figures 12, 14, 15,
table 3).
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, median_low
from typing import Any

from rich.console import Console

from benchmarks.klotski.arm import Request
from benchmarks.klotski.requests import prompts_of
from benchmarks.peers.fused import write_fused
from benchmarks.peers.peers import Peer, Weights
from benchmarks.peers.run import ALLOWANCE_BYTES, sizes
from benchmarks.peers.trial import CannotRun, Place, Questions
from benchmarks.peers.trial import run as run_peer
from runtime.budget import Budget

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 600.0

Row = dict[str, Any]


class Batched(Peer):
    """A peer whose worker stands beside this file."""

    @property
    def script(self) -> Path:
        return Path(__file__).with_name(self.worker)


ACCELERATE = Batched(
    name="accelerate-batched",
    worker="with_accelerate.py",
    weights=Weights.FUSED,
    how="device_map as in peers; all prompts in one batch",
    environment="accelerate",
)


@dataclass(frozen=True)
class Setting:
    """What is compared; `batch_size` and `n` of the ablation and of the required figure."""

    model: Path
    budget: str
    prompt_tokens: int
    new_tokens: int
    batch_size: int
    n: int
    sizes: Sequence[int]
    groups: Sequence[int]
    threads: int
    repetitions: int
    work: Path


def requests_of(setting: Setting) -> dict[str, Request]:
    """Every arm by name, none twice."""
    base = Request(
        model=str(setting.model),
        arm="klotski",
        budget=setting.budget,
        batch_size=setting.batch_size,
        n=setting.n,
        num_batches=setting.n,
        prompt_tokens=setting.prompt_tokens,
        new_tokens=setting.new_tokens,
        threads=setting.threads,
    )
    single = replace(base, n=1, num_batches=1)
    found = {"single batch, on demand": replace(single, arm="on-demand")}
    found |= {
        "simple pipeline": replace(single, arm="simple"),
        "+ multi batches": replace(base, arm="multi"),
        "+ only hot experts": replace(base, arm="hot"),
        "+ order (klotski)": base,
        "caches on disk": replace(base, kv_budget="16MiB"),
    }
    for size in setting.sizes:
        for n in setting.groups:
            one = replace(base, batch_size=size, n=n, num_batches=n)
            if one not in found.values():
                found[f"batch {size}, n {n}"] = one
    return found


def one_run(request: Request) -> Row:
    """A process of its own, from a cold start.

    Raises:
        CannotRun: it failed; with the last line that it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="moecast-klotski-") as scratch:
        asked, report = Path(scratch) / "request.json", Path(scratch) / "report.json"
        asked.write_text(json.dumps(asdict(request)))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.klotski.arm", str(asked), str(report)],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": str(request.threads)},
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CannotRun(f"no end after {LIMIT_SECONDS:.0f} s") from None
        if done.returncode:
            raise CannotRun(done.stderr.strip().splitlines()[-1])
        return json.loads(report.read_text())


def arms(setting: Setting, console: Console) -> list[Row]:
    """A row for each arm: the median speed and the speeds of all.

    The rest is of the run in the middle, of two that of the slower one.
    """
    requests = requests_of(setting)
    runs: dict[str, list[Row] | str] = {name: [] for name in requests}
    for repetition in range(setting.repetitions):
        for name, request in requests.items():
            before = runs[name]
            if isinstance(before, str):
                continue
            try:
                found = one_run(request)
            except CannotRun as error:
                runs[name] = str(error)
                console.print(f"{name}: {error}")
                continue
            before.append(found)
            console.print(
                f"{repetition + 1}/{setting.repetitions} {name}: "
                f"{found['tokens_per_second']:.2f} tokens/s"
            )
    rows = []
    for name, request in requests.items():
        done = runs[name]
        row: Row = {"name": name, **asdict(request)}
        row["model"] = setting.model.name
        if isinstance(done, str):
            rows.append({**row, "failed": done})
            continue
        speeds = [one["tokens_per_second"] for one in done]
        typical = done[speeds.index(median_low(speeds))]
        rows.append({**row, **typical, "tokens_per_second": median(speeds), "speeds": speeds})
    return rows


def check(rows: Sequence[Row]) -> bool:
    """Whether all arms with batches of one size gave each prompt the same tokens.

    Raises:
        RuntimeError: two did not.
    """
    known: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        for place, tokens in enumerate(row.pop("answers", [])):
            key = row["batch_size"], place
            if known.setdefault(key, tokens) != tokens:
                raise RuntimeError(f"{row['name']}: prompt {place} has other tokens")
    return True


def fused_weights(setting: Setting, console: Console) -> Path:
    """The layout that Accelerate reads, written where it is not there yet."""
    fused = setting.work / "weights" / setting.model.name
    if not fused.exists():
        console.print(f"writing {fused}")
        fused.parent.mkdir(parents=True, exist_ok=True)
        # Under another name until it is whole.
        partial = fused.with_name(f"{fused.name}.partial.{os.getpid()}")
        write_fused(setting.model, partial)
        partial.rename(fused)
    return fused


def accelerate(setting: Setting, console: Console) -> Row:
    """Plain batched `generate` under Accelerate's disk offload with the same memory: all prompts
    of the group at once, as many tokens each as the time allows.
    """
    weights = {Weights.FUSED: fused_weights(setting, console)}
    experts, others = sizes(weights[Weights.FUSED])
    budget = Budget.parse(setting.budget).resolve(total_bytes=experts)
    prompts = prompts_of(
        setting.model,
        setting.batch_size * setting.n,
        num_tokens=setting.prompt_tokens,
        new_tokens=setting.new_tokens,
    )
    questions = Questions(
        prompts=[list(one.tokens) for one in prompts],
        new_tokens=setting.new_tokens,
        seconds_per_prompt=0.0,
        threads=setting.threads,
    )
    row: Row = {"name": "accelerate, one batch of all", "rows": len(prompts)}
    try:
        found = run_peer(
            ACCELERATE,
            questions,
            budget_bytes=budget,
            limit_bytes=others + budget + ALLOWANCE_BYTES,
            place=Place(setting.work, weights),
        )
    except CannotRun as error:
        return {**row, "failed": str(error)}
    found.pop("answers")
    console.print(f"accelerate: {found['tokens_per_second']:.2f} tokens/s")
    return {**row, **found}
