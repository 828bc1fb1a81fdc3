"""Serving engines next to each other: same weights, prompts, memory and machine, interleaved.

In GGUF's formats all of them read the same file, each with its fastest settings.

Memory is the same for all in a format: weights other than experts, the budget for experts, and 400
MiB for the program itself, with some for each token of `context`. Weights in the page cache are
charged. Where not all experts fit, they cannot use what a program leaves of its 400 MiB: small
models would fit in it. Before the measured prompts, some of random tokens fill the memory. An
answer that takes longer than `seconds_per_prompt` ends early; a peer that cannot run is a row with
the reason. Needs the `dev` extra, Linux 6.5 and root (see `limit.py`).

Each finished run is a file, so that the same command continues an interrupted one.
"""

import json
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.greedy import generate_greedy
from benchmarks.peers.config import PeersConfig
from benchmarks.peers.peers import EXACT, PEERS, REFERENCES, Peer
from benchmarks.peers.read_ahead import check_settable, read_ahead, setting_file
from benchmarks.peers.rows import (
    FailedPeer,
    PeerKey,
    PeerRow,
    PeerRun,
    add_ratios,
    summarize_runs,
)
from benchmarks.peers.runner import PeerRunner, Questions
from benchmarks.peers.weights import ModelWeights
from benchmarks.process import ProcessFailed
from benchmarks.random_model import ROUTED
from benchmarks.reports import (
    Document,
    MachineFacts,
    describe_machine,
    print_line,
    write_part,
)
from predictors.errors import MoecastError, unknown
from predictors.files import write_atomic
from predictors.units import MIB
from runtime.config import ModelConfig
from runtime.hf.loading import load_plain
from runtime.policy.budget import Budget
from runtime.store.model_source import resolve

ALLOWANCE_BYTES = 400 * MIB
"""Memory for an interpreter with PyTorch, activations and KV cache; learned predictors with
onnxruntime take most of it."""
CONTEXT_BYTES = 128 << 10
"""More of it for each token of context: keys and values, and activations, some of them float32."""
WARM_UP_TOKENS = 64
"""Random tokens of a prompt that fills the memory. Every expert of a model with 60 is chosen by
some of them; activations of longer prompts take more memory than the measured ones'."""
ROUTED_PROMPT_TOKENS = 8
PROMPTS = (
    "The heart pumps blood through the body, and the lungs",
    "It was late in the evening when the old man came to the door and",
    "def and class statements bind names in the current namespace. A class",
)


@dataclass(frozen=True)
class ReadAheadPlan:
    """The settings at which programs that map their weights run."""

    setting: Path
    own_kib: int
    tried_kib: tuple[int, ...]

    def choose(self, peer: Peer, *, all_fit: bool) -> tuple[int | None, ...]:
        """Returns the settings for a peer; where all experts fit, only loading depends on them."""
        if not peer.maps_weights:
            return (None,)
        return (self.own_kib,) if all_fit else self.tried_kib

    def apply(self, kib: int | None) -> AbstractContextManager[None]:
        """Sets the disk's read-ahead for the time of a run, unless it is the machine's own."""
        if kib is None or kib == self.own_kib:
            return nullcontext()
        return read_ahead(self.setting, kib)


def plan_read_ahead(config: PeersConfig) -> ReadAheadPlan:
    """Reads the machine's own setting, and checks that others can be set.

    Raises:
        MoecastError: they cannot.
    """
    config.work.mkdir(parents=True, exist_ok=True)
    setting = setting_file(config.work)
    own = int(setting.read_text())
    if config.read_ahead:
        check_settable(setting)
    return ReadAheadPlan(setting, own, tuple(config.read_ahead) or (own,))


def plain_answers(
    model: Path, dtype: str, prompts: list[list[int]], new_tokens: int
) -> list[list[int]]:
    """Returns greedy answers of plain Transformers with every expert in memory."""
    plain = load_plain(model, dtype=getattr(torch, dtype))
    return [
        generate_greedy(plain, torch.tensor([prompt]), new_tokens)[0].tolist() for prompt in prompts
    ]


Results = dict[PeerKey, list[PeerRun] | str]
"""Runs, or the reason why there are none."""


def finished_run(runner: PeerRunner, key: PeerKey, questions: Questions, repetition: int) -> Path:
    """Returns the file of a run, named by all that it depends on."""
    weights = runner.weights
    folder = weights.work / "finished" / f"{weights.model.name}-{weights.format}"
    folder.mkdir(parents=True, exist_ok=True)
    of = json.dumps([vars(key), asdict(questions), repetition], sort_keys=True)
    return folder / f"{sha256(of.encode()).hexdigest()[:16]}.json"


def run_interleaved(
    keys: Sequence[PeerKey],
    peers: dict[str, Peer],
    questions: Questions,
    runner: PeerRunner,
    plan: ReadAheadPlan,
    repetitions: int,
) -> Results:
    results: Results = {key: [] for key in keys}
    for name in {key.peer: None for key in keys}:
        try:
            runner.prepare(peers[name])
        except ProcessFailed as error:
            print_line(f"{name}: {error}")
            results |= {key: str(error) for key in keys if key.peer == name}
    for repetition in range(1, repetitions + 1):
        for key in keys[:: -1 if repetition % 2 == 0 else 1]:
            runs = results[key]
            if isinstance(runs, str):
                continue
            label = f"{repetition}/{repetitions} {key.budget} {key.peer}, {key.threads} threads"
            if key.read_ahead_kib is not None:
                label += f", read-ahead {key.read_ahead_kib} KiB"
            done = finished_run(runner, key, questions, repetition)
            try:
                if not done.exists():
                    with plan.apply(key.read_ahead_kib):
                        report = runner.run(
                            peers[key.peer],
                            replace(questions, threads=key.threads),
                            budget_bytes=key.budget_bytes,
                            limit_bytes=key.limit_bytes,
                            reserved_bytes=key.reserved_bytes,
                        )
                    write_atomic(done, json.dumps(report).encode())
            except ProcessFailed as error:
                print_line(f"{label}: {error}")
                # Other threads and read-ahead do not make it run.
                alike = [k for k in keys if (k.peer, k.budget) == (key.peer, key.budget)]
                results |= {k: str(error) for k in alike if not results[k]}
                continue
            run = TypeAdapter(PeerRun).validate_json(done.read_bytes())
            runs.append(run)
            print_line(
                f"{label}: first token after {run.answers[0].seconds[0]:.2f} s, "
                f"{run.tokens_per_second:.2f} tokens/s"
            )
    return results


def choose_peers(config: PeersConfig) -> list[Peer]:
    """Returns the peers by name.

    Raises:
        MoecastError: an unknown peer or format, or a format that none of the peers has.
    """
    names = [peer.name for peer in PEERS]
    for name in config.peer:
        if name not in names:
            raise MoecastError(unknown("peer", name, names))
    peers = [peer for peer in PEERS if not config.peer or peer.name in config.peer]
    for name in config.format:
        if name not in REFERENCES:
            raise MoecastError(unknown("format", name, list(REFERENCES)))
        if not any(name in peer.formats for peer in peers):
            has = "; ".join(f"{peer.name}: {', '.join(peer.formats)}" for peer in peers)
            raise MoecastError(f"format={name}: no chosen peer has it ({has})")
    return peers


def count_allowance_bytes(config: PeersConfig) -> int:
    return ALLOWANCE_BYTES + config.context * CONTEXT_BYTES


def list_keys(
    config: PeersConfig,
    peers: Sequence[Peer],
    plan: ReadAheadPlan,
    *,
    experts_bytes: int,
    others_bytes: int,
) -> list[PeerKey]:
    """Returns every combination of budget, peer, threads and read-ahead that runs."""
    keys, allowance_bytes = [], count_allowance_bytes(config)
    for budget in config.budget:
        budget_bytes = Budget.parse(budget).resolve(total_bytes=experts_bytes)
        all_fit = budget_bytes >= experts_bytes
        keys += [
            PeerKey(
                peer=peer.name,
                how=peer.how,
                budget=budget,
                budget_bytes=budget_bytes,
                limit_bytes=others_bytes + budget_bytes + allowance_bytes,
                reserved_bytes=0 if all_fit else allowance_bytes,
                threads=threads,
                read_ahead_kib=kib,
            )
            for peer in peers
            if all_fit or not peer.needs_all
            for threads in config.threads
            for kib in plan.choose(peer, all_fit=all_fit)
        ]
    return keys


def make_questions(config: PeersConfig, tokenizer: PreTrainedTokenizerBase) -> Questions:
    """Returns the prompts: of text, or stretches of the log that the model repeats."""
    settings: dict[str, Any] = {
        "new_tokens": config.max_new_tokens,
        "seconds_per_prompt": config.seconds_per_prompt,
        "threads": config.threads[0],
    }
    rng = random.Random(config.seed)
    if (routed := config.model / ROUTED).is_file():
        logged = json.loads(routed.read_text())
        stretch = len(logged) // (len(PROMPTS) + 1)
        warm_up, *prompts = (
            logged[first : first + stretch]
            for first in range(0, stretch * (len(PROMPTS) + 1), stretch)
        )
        at_least = min(ROUTED_PROMPT_TOKENS, stretch)
        return Questions(
            prompts=[
                rng.choices(logged, k=config.context) + tokens[:at_least] for tokens in prompts
            ],
            warm_up=[warm_up],
            **settings,
        )
    context = rng.choices(range(len(tokenizer)), k=config.context)
    return Questions(
        prompts=[context + tokenizer(prompt)["input_ids"] for prompt in PROMPTS],
        **settings,
        warm_up=[
            [rng.randrange(len(tokenizer)) for _ in range(WARM_UP_TOKENS)]
            for _ in range(config.warm_ups)
        ],
    )


def run_format(
    config: PeersConfig,
    name: str,
    peers: Sequence[Peer],
    questions: Questions,
    plan: ReadAheadPlan,
    machine: MachineFacts,
) -> Document:
    """Measures all peers in one format, and writes its part of the results, which is returned."""
    started = time.monotonic()
    weights = ModelWeights(config.model, config.work, config.environments, name)
    experts_bytes, others_bytes = weights.measure()
    keys = list_keys(config, peers, plan, experts_bytes=experts_bytes, others_bytes=others_bytes)
    results = run_interleaved(
        keys,
        {peer.name: peer for peer in peers},
        questions,
        PeerRunner(weights),
        plan,
        config.repetitions,
    )
    expected = None
    if name in EXACT:
        expected = plain_answers(
            config.model, weights.dtype, questions.prompts, config.max_new_tokens
        )
    rows: list[PeerRow | FailedPeer] = [
        FailedPeer(**vars(key), cannot_run=runs)
        if isinstance(runs, str)
        else summarize_runs(key, runs, expected)
        for key, runs in results.items()
    ]
    return write_format(
        config,
        name,
        machine=machine,
        # As this project packs them.
        experts_bytes=experts_bytes,
        other_weights_bytes=others_bytes,
        allowance_bytes=count_allowance_bytes(config),
        reference_peers=list(REFERENCES[name]),
        prompts=[len(prompt) for prompt in questions.prompts],
        new_tokens=config.max_new_tokens,
        warm_up_tokens=sum(map(len, questions.warm_up)),
        seconds=time.monotonic() - started,
        rows=add_ratios(rows, REFERENCES[name]),
    )


def write_format(config: PeersConfig, name: str, **figures: Any) -> Document:
    """Replaces the part of the model in this format in the file of results, and returns it."""
    model = config.model.name
    part_name = f"{model} {name}" + (f" after {config.context} tokens" if config.context else "")
    part = write_part(config, part_name, model=model, format=name, **figures)
    shutil.rmtree(config.work / "finished" / f"{model}-{name}", ignore_errors=True)
    return part


def run_peers(config: PeersConfig) -> None:
    # Late: the training packages.
    from benchmarks.tables.peers import describe_part

    machine = describe_machine(max(config.threads))
    peers = choose_peers(config)
    plan = plan_read_ahead(config)
    tokenizer = AutoTokenizer.from_pretrained(
        resolve(ModelConfig(id=str(config.model))), local_files_only=True, trust_remote_code=False
    )
    questions = make_questions(config, tokenizer)
    console = Console(highlight=False, soft_wrap=True)
    for name in config.format:
        chosen = [peer for peer in peers if name in peer.formats]
        part = run_format(config, name, chosen, questions, plan, machine)
        console.print("\n".join(describe_part(part)), markup=False)
