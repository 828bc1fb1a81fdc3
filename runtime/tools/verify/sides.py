"""The two sides of a verification, each of which answers the prompts in its own child process."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from predictors.errors import MoecastError
from runtime.config import Exact, VerifyModelConfig
from runtime.engine.devices import primary_device
from runtime.engine.loading import load_served
from runtime.engine.memory import peak_memory_bytes
from runtime.generation.lockstep.group import LockstepGroup
from runtime.hf.decode_step import choose_kernels, read_decode_threads
from runtime.hf.exact import set_reference
from runtime.hf.loading import count_weight_bytes
from runtime.hf.sharing import set_shared_reference
from runtime.tools.child_process import ChildFailure, run_in_child
from runtime.tools.verify.answers import write_answers
from runtime.tools.verify.reference import load_lazy, load_plain_model, load_stored


class VerifySide(StrEnum):
    """The model that answers."""

    SERVED = "served"
    """The model as moecast serves it."""
    PLAIN = "plain"
    """Transformers with all experts in memory."""
    LAZY = "lazy"
    """Transformers' eager loop over experts that are read one at a time."""
    STORED = "stored"
    """Quantised weights, which the same kernels multiply."""


@dataclass(frozen=True, kw_only=True)
class VerifyTask:
    """The prompts for one side."""

    side: VerifySide
    config: VerifyModelConfig
    budget: str = ""
    """For `SERVED` only."""
    prompts: list[list[int]]
    """Token ids."""
    output: Path
    """New folder for the answers."""


@dataclass(frozen=True, kw_only=True)
class SideReport:
    """Description of a side's model and process; sizes in bytes."""

    model_class: str
    transformers: str
    torch: str
    dtype: str
    device: str
    threads: int
    decode_threads: int | None
    """Threads of steps of one token; None on other devices than CPUs."""
    decode_kernels: str
    """The `DecodeKernels` in force, never `auto`."""
    exact: str
    """The `Exact` in force, never `auto`."""
    experts_implementation: str | None
    weights_bytes: int
    peak_memory_bytes: int
    stats: dict[str, Any] | None = None
    """Statistics of the engine, for `SERVED`."""


class ChildFailed(RuntimeError):
    """A side's process ended without an answer."""


def run_side(task: VerifyTask) -> SideReport:
    """Answer the prompts in a child process; the answers are in the task's output folder.

    Raises:
        MoecastError: the model cannot be loaded or run with these settings.
        ChildFailed: the process died.
    """
    result = run_in_child("runtime.tools.verify.sides:answer_prompts", task, task.output)
    if isinstance(result, ChildFailure):
        if result.is_user_error:
            raise MoecastError(result.reason)
        raise ChildFailed(f"side {task.side.value}: {result.reason}")
    return SideReport(**result)


def run_together(model: PreTrainedModel, answers: Sequence[Callable[[], None]]) -> None:
    """Write all answers at once, as a server does: the reference writes one after another."""
    with LockstepGroup(model) as group:
        tasks = [group.start(answer) for answer in answers]
        while group.sequences:
            group.step()
    for task in tasks:
        if task.error is not None:
            raise task.error


def answer_prompts(task: VerifyTask) -> dict[str, Any]:
    """Load the side's model, write its answers, and return a `SideReport` as a dictionary."""
    config = task.config
    exact = Exact.EAGER
    if task.side is VerifySide.SERVED:
        model = load_served(config, budget=task.budget)
        exact = model.moecast.exact
    elif task.side is VerifySide.LAZY:
        model = load_lazy(config.model)
    elif task.side is VerifySide.STORED:
        model = load_stored(config)
    else:
        model = load_plain_model(config.model, primary_device(config))
        exact = set_reference(model, config.model.exact)
    if config.model.exact is Exact.SHARED and task.side is not VerifySide.SERVED:
        exact = set_shared_reference(model)
    limits = {"max_new_tokens": config.max_new_tokens, "seed": config.seed}
    answers = [
        partial(write_answers, model, prompt, task.output, number, **limits)
        for number, prompt in enumerate(task.prompts)
    ]
    if task.side is VerifySide.SERVED and exact is Exact.SHARED:
        run_together(model, answers)
    else:
        for answer in answers:
            answer()
    report = SideReport(
        model_class=type(model).__name__,
        transformers=transformers.__version__,
        torch=torch.__version__,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        threads=torch.get_num_threads(),
        decode_threads=read_decode_threads(model),
        decode_kernels=choose_kernels(config.model.decode_kernels, model.dtype).value,
        exact=exact.value,
        experts_implementation=model.config._experts_implementation,
        weights_bytes=count_weight_bytes(model),
        peak_memory_bytes=peak_memory_bytes(),
        stats=model.moecast.stats() if task.side is VerifySide.SERVED else None,
    )
    if task.side is VerifySide.SERVED:
        model.moecast.close()
    return asdict(report)
