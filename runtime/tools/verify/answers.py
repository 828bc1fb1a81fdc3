"""What is compared: a model's logits and tokens for a prompt.

Shape suffixes: T prompt tokens, N new tokens, V vocabulary.
"""

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from runtime.store.base import as_memoryview


class StepLogits(LogitsProcessor):
    """Writes each step's logits `(1, V)` to a file as float32, and keeps none: what is checked
    must not add to the memory that is measured.
    """

    def __init__(self, file: BinaryIO):
        self._file = file

    def __call__(self, _tokens: Tensor, scores: Tensor) -> Tensor:
        self._file.write(as_memoryview(scores.detach().float().cpu().contiguous()))
        return scores


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    prompt: list[int],
    folder: Path,
    number: int,
    *,
    max_new_tokens: int,
    seed: int,
) -> None:
    """Writes logits of the prompt `(T, V)`, greedy tokens `(N,)`, and their logits `(N, V)`.

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
    # Diffusion models draw random numbers in every forward pass, greedy or not.
    torch.manual_seed(seed)
    logits = model(input_ids=inputs, attention_mask=mask, **decoder).logits[0]
    save_file({"logits": logits.cpu().contiguous()}, file_of(folder, number, "prompt"))
    del logits
    tokens = torch.empty(0, dtype=torch.long)
    with file_of(folder, number, "steps").open("wb") as file:
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
    save_file({"tokens": new.contiguous()}, file_of(folder, number, "tokens"))


def file_of(folder: Path, number: int, what: str) -> Path:
    """Where one part of the answer to a prompt is kept."""
    return folder / f"{number:04d}-{what}"


def answers_of(folder: Path, number: int) -> dict[str, Tensor]:
    """All parts of the answer to a prompt."""
    parts = ("prompt", "tokens")
    found = {k: v for part in parts for k, v in load_file(file_of(folder, number, part)).items()}
    steps = np.fromfile(file_of(folder, number, "steps"), dtype=np.float32)
    found["logits of new tokens"] = torch.from_numpy(steps).view(-1, found["logits"].shape[-1])
    return found


def compare(expected: Path, found: Path, number: int) -> dict[str, Any]:
    """One prompt's answers of two sides, bit by bit.

    Returns:
        `equal`, positions and tokens compared, and where and by how much the first of each differ
        (null where nothing does).
    """
    left, right = answers_of(expected, number), answers_of(found, number)
    row: dict[str, Any] = {
        "prompt": number,
        "equal": True,
        "tokens_compared": 0,
        "logit_positions_compared": 0,
        "max_abs_difference": 0.0,
        "first_token_that_differs": None,
        "first_logits_that_differ": None,
    }
    for name, a in left.items():
        b = right[name]
        row["equal"] &= torch.equal(bits(a), bits(b)) and a.dtype == b.dtype
        if name == "tokens":
            row["tokens_compared"] = max(len(a), len(b))
            row["first_token_that_differs"] = first_difference(a[:, None], b[:, None])
            continue
        row["logit_positions_compared"] += max(len(a), len(b))
        where = first_difference(a, b)
        if where is not None:
            first = row["first_logits_that_differ"]
            row["first_logits_that_differ"] = first or f"position {where} of {name}"
            length = min(len(a), len(b))
            difference = (a[:length].double() - b[:length].double()).abs().max()
            largest = torch.maximum(difference, torch.tensor(row["max_abs_difference"] or 0.0))
            # JSON has no NaN and no infinity: a difference that is no number is null.
            row["max_abs_difference"] = float(largest) if largest.isfinite() else None
    return row


def bits(tensor: Tensor) -> Tensor:
    """The bytes: NaN equals NaN, and 0 is not -0."""
    return tensor.view(torch.uint8) if tensor.numel() else tensor


def first_difference(a: Tensor, b: Tensor) -> int | None:
    """First row in which two matrices differ; the shorter one's end, if they agree up to there."""
    length = min(len(a), len(b))
    differing = (bits(a[:length]) != bits(b[:length])).any(dim=-1) if length else torch.tensor([])
    if differing.any():
        return int(differing.float().argmax())
    return None if len(a) == len(b) else length
