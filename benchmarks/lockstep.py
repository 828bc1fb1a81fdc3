"""`python -m benchmarks lockstep`: throughput of sequences that are generated together.

The settings of `model.exact` and the numbers of sequences take turns in one process, so that ratios
hold on a machine whose speed varies.
"""

import statistics
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from benchmarks.config import LockstepConfig
from benchmarks.greedy import generate_greedy
from benchmarks.reports import describe_machine, print_line, write_report
from predictors.errors import MoecastError
from runtime.config import Exact
from runtime.generation.loading import load
from runtime.generation.lockstep.group import LockstepGroup
from runtime.presets import find_model

MODEL = "qwen2-moe-tiny"
PROMPT_TOKENS = 16
WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class LockstepRow:
    """Sequences that are generated together under one setting."""

    exact: str
    clients: int
    tokens_per_second: float
    """Median of the throughput of all sequences together."""
    over_one: float
    """Median of the ratios to one sequence under the same setting in the same round."""
    over_reference: float
    """Median of the ratios to one sequence under the first setting in the same round."""


def run_lockstep(config: LockstepConfig) -> None:
    """Measure every setting with every number of sequences.

    Raises:
        MoecastError: the model cannot be served under a setting.
    """
    machine = describe_machine(config.threads)
    torch.set_num_threads(config.threads)
    models = {exact: load_reference(config, Exact(exact)) for exact in config.exact}
    numbers = sorted({1, *config.clients})
    rounds: list[dict[tuple[str, int], float]] = []
    for model in models.values():
        measure_throughput(model, clients=1, steps=config.steps)  # reads experts, warms up
    for _ in range(config.repetitions):
        rounds.append(
            {
                (exact, clients): measure_throughput(model, clients=clients, steps=config.steps)
                for clients in numbers
                for exact, model in models.items()
            }
        )
    for model in models.values():
        model.close()
    rows = [
        make_row(rounds, exact, clients, reference=config.exact[0])
        for exact in models
        for clients in numbers
    ]
    write_report(config, machine=machine, model=MODEL, rows=rows)
    for row in rows:
        print_line(str(row))


def load_reference(config: LockstepConfig, exact: Exact) -> PreTrainedModel:
    """Load the reference model under a setting.

    Raises:
        MoecastError: another setting came into force.
    """
    model = load(
        replace(find_model(MODEL), exact=exact, dtype=config.dtype),
        device="cpu",
        budget=config.budget,
        system=config.system,
    )
    if model.moecast.exact is not exact:
        raise MoecastError(f"exact={exact.value}: this machine has {model.moecast.exact.value}")
    return model


def measure_throughput(model: PreTrainedModel, *, clients: int, steps: int) -> float:
    """Return tokens per second of decode steps of several sequences."""
    random = torch.Generator().manual_seed(0)
    num_tokens = steps + WARM_UP_STEPS + 1
    with LockstepGroup(model) as group:
        for _ in range(clients):
            prompt = torch.randint(1, model.config.vocab_size, (1, PROMPT_TOKENS), generator=random)
            group.start(partial(generate_greedy, model, prompt, num_tokens))
        for _ in range(WARM_UP_STEPS):
            group.step()
        start = time.perf_counter()
        for _ in range(steps):
            group.step()
        return clients * steps / (time.perf_counter() - start)


def make_row(
    rounds: list[dict[tuple[str, int], float]], exact: str, clients: int, *, reference: str
) -> LockstepRow:
    own = [measured[exact, clients] for measured in rounds]
    return LockstepRow(
        exact=exact,
        clients=clients,
        tokens_per_second=statistics.median(own),
        over_one=statistics.median(r[exact, clients] / r[exact, 1] for r in rounds),
        over_reference=statistics.median(r[exact, clients] / r[reference, 1] for r in rounds),
    )
