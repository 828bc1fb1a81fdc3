"""The two sides of a verification, each of which answers the prompts in its own child process.

A side writes its model's logits and tokens, which are compared bit by bit.

Shape suffixes: T prompt tokens, N new tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from predictors.errors import MoecastError
from runtime.config import Exact, VerifyModelConfig
from runtime.engine.devices import primary_device
from runtime.engine.loading import load_served
from runtime.engine.memory import peak_memory_bytes
from runtime.generation.lockstep.group import LockstepGroup
from runtime.hf.decode_step import choose_kernels, read_decode_threads
from runtime.hf.grouped import set_reference
from runtime.hf.loading import count_weight_bytes
from runtime.hf.sharing import set_shared_reference
from runtime.store.base import as_memoryview
from runtime.tools.child_process import ChildFailure, run_in_child
from runtime.tools.verify.reference import load_lazy, load_plain_model, load_stored


class StepLogits(LogitsProcessor):
    """Writes each step's logits `(1, V)` to a file as float32.

    None are kept, because they would add to the memory that is measured.
    """

    def __init__(self, file: BinaryIO):
        self._file = file

    def __call__(self, _tokens: Tensor, scores: Tensor) -> Tensor:
        self._file.write(as_memoryview(scores.detach().float().cpu().contiguous()))
        return scores


@dataclass(kw_only=True)
class PromptComparison:
    """Differences between two sides' answers to one prompt."""

    prompt: int
    equal: bool = True
    tokens_compared: int = 0
    logit_positions_compared: int = 0
    max_abs_difference: float | None = 0.0
    """None if a difference is NaN or infinite."""
    is_finite: bool = True
    """No logits of the reference are NaN or infinite; those of suppressed tokens may be -inf."""
    first_token_that_differs: int | None = None
    first_logits_that_differ: str | None = None


@torch.no_grad()
def write_answers(
    model: PreTrainedModel,
    prompt: list[int],
    folder: Path,
    number: int,
    *,
    max_new_tokens: int,
    seed: int,
) -> None:
    """Write logits of the prompt `(T, V)`, greedy tokens `(N,)`, and their logits `(N, V)`.

    An encoder-decoder model reads the prompt in its encoder, and in its decoder shifted by one.
    """
    device = model.device
    inputs = torch.tensor([prompt], device=device)
    mask = torch.ones_like(inputs)
    decoder = {}
    if model.config.is_encoder_decoder:
        first = model.generation_config.decoder_start_token_id or 0
        start = torch.tensor([[first]], device=device)
        decoder = {"decoder_input_ids": torch.cat([start, inputs[:, :-1]], dim=1)}
    # Diffusion models draw random numbers in every forward pass, even with greedy decoding.
    torch.manual_seed(seed)
    logits = model(input_ids=inputs, attention_mask=mask, **decoder).logits[0]
    save_file({"logits": logits.cpu().contiguous()}, answer_path(folder, number, "prompt"))
    del logits
    tokens = torch.empty(0, dtype=torch.long)
    with answer_path(folder, number, "steps").open("wb") as file:
        if model.can_generate():
            torch.manual_seed(seed)
            output = model.generate(
                inputs,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                logits_processor=LogitsProcessorList([StepLogits(file)]),
            )
            tokens = getattr(output, "sequences", output)[0].cpu()
    new = tokens if decoder else tokens[len(prompt) :]
    save_file({"tokens": new.contiguous()}, answer_path(folder, number, "tokens"))


def answer_path(folder: Path, number: int, what: str) -> Path:
    return folder / f"{number:04d}-{what}"


def read_answers(folder: Path, number: int) -> dict[str, Tensor]:
    answers: dict[str, Tensor] = {}
    for part in ("prompt", "tokens"):
        answers |= load_file(answer_path(folder, number, part))
    steps = np.fromfile(answer_path(folder, number, "steps"), dtype=np.float32)
    answers["logits of new tokens"] = torch.from_numpy(steps).view(-1, answers["logits"].shape[-1])
    return answers


def compare_answers(expected: Path, served: Path, number: int) -> PromptComparison:
    """Compare the two sides' answers to one prompt bit by bit."""
    left, right = read_answers(expected, number), read_answers(served, number)
    result = PromptComparison(prompt=number)
    for name, a in left.items():
        b = right[name]
        result.equal &= torch.equal(as_bytes(a), as_bytes(b)) and a.dtype == b.dtype
        if name == "tokens":
            result.tokens_compared = max(len(a), len(b))
            result.first_token_that_differs = first_differing_row(a[:, None], b[:, None])
            continue
        result.logit_positions_compared += max(len(a), len(b))
        result.is_finite &= bool((a < math.inf).all())
        position = first_differing_row(a, b)
        if position is not None:
            first = result.first_logits_that_differ
            result.first_logits_that_differ = first or f"position {position} of {name}"
            length = min(len(a), len(b))
            difference = (a[:length].double() - b[:length].double()).abs().max()
            largest = torch.maximum(difference, torch.tensor(result.max_abs_difference or 0.0))
            # JSON has neither NaN nor infinity.
            result.max_abs_difference = float(largest) if largest.isfinite() else None
    return result


def as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes: NaN equals NaN, and 0 differs from -0."""
    return tensor.view(torch.uint8) if tensor.numel() else tensor


def first_differing_row(a: Tensor, b: Tensor) -> int | None:
    """Return the first row that differs, or the shorter one's length if all before are equal."""
    length = min(len(a), len(b))
    differing = (
        (as_bytes(a[:length]) != as_bytes(b[:length])).any(dim=-1) if length else torch.tensor([])
    )
    if differing.any():
        return int(differing.float().argmax())
    return None if len(a) == len(b) else length


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
        model = load_served(config, budget=task.budget, must_generate=False)
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
