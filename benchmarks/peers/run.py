"""Serving engines next to each other: same weights, prompts, memory and machine, interleaved.

Memory is the same for all: weights other than experts + budget for experts + 400 MiB. Weights are
in float32 everywhere, and so is arithmetic. An answer that takes longer than `seconds_per_prompt`
ends early; a peer that cannot run is a row with the reason. Needs the `dev` extra, Linux 6.5 and
root (see `limit.py`).
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter
from rich.console import Console
from transformers import AutoTokenizer

from benchmarks.config import PeersConfig
from benchmarks.greedy import generate_greedy
from benchmarks.peers.fused import Checkpoint, write_fused
from benchmarks.peers.peers import PEERS, Peer, WeightLayout
from benchmarks.peers.rows import (
    REFERENCE,
    FailedPeer,
    PeerKey,
    PeerRow,
    PeerRun,
    PeersReport,
    peers_table,
    summarize_runs,
)
from benchmarks.peers.runner import PeerRunner, Questions
from benchmarks.process import ProcessFailed
from benchmarks.reports import describe_machine, print_line, write_report
from predictors.errors import MoecastError, unknown
from predictors.units import MIB
from runtime.hf.loading import load_plain
from runtime.policy.budget import Budget

ALLOWANCE_BYTES = 400 * MIB
"""Memory for an interpreter with PyTorch, activations and KV cache; learned predictors with
onnxruntime take most of it. A peer that needs less has the rest as page cache."""
PROMPTS = (
    "The heart pumps blood through the body, and the lungs",
    "It was late in the evening when the old man came to the door and",
    "def and class statements bind names in the current namespace. A class",
)


def write_once(path: Path, write: Callable[[Path, Path], None], source: Path) -> Path:
    """Converts a checkpoint unless that was done before; the result is complete or absent."""
    if not path.exists():
        print_line(f"writing {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial.{os.getpid()}")
        write(source, partial)
        partial.rename(path)
    return path


def fused_weights(model: Path, work: Path) -> Path:
    """Returns the folder of the model's weights with fused experts."""
    return write_once(work / "weights" / model.name, write_fused, model)


def write_layouts(model: Path, work: Path) -> dict[WeightLayout, Path]:
    """Returns the weights in every layout."""
    from benchmarks.peers.gguf_file import write_gguf

    fused = fused_weights(model, work)
    gguf = write_once(work / "weights" / f"{model.name}.gguf", write_gguf, fused)
    return {WeightLayout.SEPARATE: model, WeightLayout.FUSED: fused, WeightLayout.GGUF: gguf}


def weight_bytes(fused: Path) -> tuple[int, int]:
    """Returns the bytes of all experts, and of all other weights."""
    checkpoint = Checkpoint(fused)
    experts = others = 0
    for key in checkpoint:
        if ".mlp.experts." in key:
            experts += checkpoint[key].nbytes
        else:
            others += checkpoint[key].nbytes
    return experts, others


def plain_answers(model: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Returns greedy answers of plain Transformers with every expert in memory."""
    plain = load_plain(model, dtype=torch.float32)
    return [
        generate_greedy(plain, torch.tensor([prompt]), new_tokens)[0].tolist() for prompt in prompts
    ]


Results = dict[tuple[str, str], list[PeerRun] | str]
"""Runs by peer and budget, or the reason why there are none."""


def run_interleaved(
    peers: Sequence[Peer],
    keys: Mapping[tuple[str, str], PeerKey],
    questions: Questions,
    runner: PeerRunner,
    repetitions: int,
) -> Results:
    results: Results = {key: [] for key in keys}
    by_name = {peer.name: peer for peer in peers}
    for peer in peers:
        try:
            runner.prepare(peer)
        except ProcessFailed as error:
            results |= {key: str(error) for key in keys if key[0] == peer.name}
    for repetition in range(1, repetitions + 1):
        for (name, budget), key in keys.items():
            runs = results[name, budget]
            if isinstance(runs, str):
                continue
            label = f"{repetition}/{repetitions} {budget} {name}"
            try:
                report, memory = runner.run(
                    by_name[name],
                    questions,
                    budget_bytes=key.budget_bytes,
                    limit_bytes=key.limit_bytes,
                )
            except ProcessFailed as error:
                results[name, budget] = str(error)
                print_line(f"{label}: {error}")
                continue
            run = TypeAdapter(PeerRun).validate_python(report | asdict(memory))
            runs.append(run)
            print_line(
                f"{label}: first token after {run.answers[0].seconds[0]:.2f} s, "
                f"{run.tokens_per_second:.2f} tokens/s"
            )
    return results


def add_ratios(rows: Sequence[PeerRow | FailedPeer]) -> list[PeerRow | FailedPeer]:
    """Adds each row's decode throughput relative to the reference peer's at the same budget."""
    base = {
        row.budget: row.tokens_per_second
        for row in rows
        if isinstance(row, PeerRow) and row.peer == REFERENCE
    }
    return [
        replace(row, decode_over_accelerate=row.tokens_per_second / base[row.budget])
        if isinstance(row, PeerRow) and row.budget in base
        else row
        for row in rows
    ]


def choose_peers(config: PeersConfig) -> list[Peer]:
    names = [peer.name for peer in PEERS]
    for name in config.peer:
        if name not in names:
            raise MoecastError(unknown("peer", name, names))
    peers = [peer for peer in PEERS if not config.peer or peer.name in config.peer]
    if config.entries is None:
        return peers
    entries = {"entries": str(config.entries.absolute())}
    return [
        replace(peer, options=peer.options | entries) if peer.environment is None else peer
        for peer in peers
    ]


def run_peers(config: PeersConfig) -> None:
    started = time.monotonic()
    machine = describe_machine(config.threads)
    peers = choose_peers(config)
    weights = write_layouts(config.model, config.work)
    experts_bytes, others_bytes = weight_bytes(weights[WeightLayout.FUSED])
    tokenizer = AutoTokenizer.from_pretrained(
        config.model, local_files_only=True, trust_remote_code=False
    )
    questions = Questions(
        prompts=[tokenizer(prompt)["input_ids"] for prompt in PROMPTS],
        new_tokens=config.max_new_tokens,
        seconds_per_prompt=config.seconds_per_prompt,
        threads=config.threads,
    )
    keys = {}
    for budget in config.budget:
        budget_bytes = Budget.parse(budget).resolve(total_bytes=experts_bytes)
        for peer in peers:
            keys[peer.name, budget] = PeerKey(
                peer=peer.name,
                how=peer.how,
                budget=budget,
                budget_bytes=budget_bytes,
                limit_bytes=others_bytes + budget_bytes + ALLOWANCE_BYTES,
            )
    expected = plain_answers(config.model, questions.prompts, config.max_new_tokens)
    runner = PeerRunner(config.work, weights, config.environments)
    results = run_interleaved(peers, keys, questions, runner, config.repetitions)
    rows: list[PeerRow | FailedPeer] = []
    for place, key in keys.items():
        runs = results[place]
        if isinstance(runs, str):
            rows.append(FailedPeer(**vars(key), cannot_run=runs))
        else:
            rows.append(summarize_runs(key, runs, expected))
    report = PeersReport(
        machine=machine,
        experts_bytes=experts_bytes,
        other_weights_bytes=others_bytes,
        allowance_bytes=ALLOWANCE_BYTES,
        dtype="float32",
        reference_peer=REFERENCE,
        repetitions=config.repetitions,
        prompts=[len(prompt) for prompt in questions.prompts],
        new_tokens=config.max_new_tokens,
        seconds_per_prompt=questions.seconds_per_prompt,
        seconds=time.monotonic() - started,
        rows=add_ratios(rows),
    )
    write_report(config, report)
    Console(highlight=False, soft_wrap=True).print("\n".join(peers_table(report)), markup=False)
