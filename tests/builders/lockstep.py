"""Sequences that generate in step, and what each answers."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from runtime.generation.lockstep.group import LockstepGroup
from runtime.generation.lockstep.sequence import SequenceTask

ANSWER_TOKENS = 5
"""So many that all of the prompts are there when the first has its last."""
_RANDOM = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(2, 60, (1, n), generator=_RANDOM) for n in (5, 1, 9, 3, 12, 7, 2, 8, 4)]


def answer(model: PreTrainedModel, tokens: Tensor, **options: Any) -> Tensor:
    """The logits of each new token; greedy tokens follow from them."""
    options = {"max_new_tokens": ANSWER_TOKENS, "do_sample": False, "pad_token_id": 0, **options}
    logits = {"output_logits": True, "return_dict_in_generate": True}
    output = model.generate(tokens, attention_mask=torch.ones_like(tokens), **logits, **options)
    return torch.stack(output.logits)


def run(group: LockstepGroup) -> int:
    """Steps until every sequence has ended; returns the number of steps."""
    num_steps = 0
    while group.sequences:
        group.step()
        num_steps += 1
    return num_steps


def results_of(tasks: list[SequenceTask]) -> list[Any]:
    """Fails where one of them has failed."""
    assert [task.error for task in tasks] == [None] * len(tasks)
    return [task.result for task in tasks]


def run_together(model: PreTrainedModel, calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """The results of generations that begin together, each with its place as its seed."""
    with LockstepGroup(model) as group:
        tasks = [group.start(call, seed=seed) for seed, call in enumerate(calls)]
        run(group)
    return results_of(tasks)


def answer_together(model: PreTrainedModel, asked: list[Tensor], **options: Any) -> list[Tensor]:
    return run_together(model, [partial(answer, model, tokens, **options) for tokens in asked])


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    equal = [torch.equal(*pair) for pair in zip(found, expected, strict=True)]
    assert equal == [True] * len(expected)
