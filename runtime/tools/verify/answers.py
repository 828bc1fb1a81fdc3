"""Write a model's logits and tokens for a prompt and compare those of two sides bit by bit.

Shape suffixes: T prompt tokens, N new tokens, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from runtime.store.base import as_memoryview


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
