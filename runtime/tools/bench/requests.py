"""Requests of a live comparison: the same for every system, the first of them to warm up."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from predictors.errors import MoecastError
from runtime.tools.bench.config import BenchConfig
from runtime.tools.verify.prompts import token_prompts


@dataclass(frozen=True)
class Request:
    """Prompts that are continued together."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids, one prompt for each row of the batch."""
    new_tokens: int
    """Greedy tokens of each row."""
    is_measured: bool


def requests_of(config: BenchConfig, folder: Path) -> tuple[dict[int, list[Request]], str]:
    """For each batch size the requests, and what their prompts are, in words.

    Raises:
        MoecastError: a prompt has no tokens, or is too long for the model with its answer.
    """
    prompts, what = token_prompts(folder, config.prompts, seed=config.seed)
    context = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    longest = max(map(len, prompts)) + max(config.max_new_tokens, config.warm_up_tokens)
    if context is not None and longest > context:
        raise MoecastError(
            f"a prompt and its answer take {longest} tokens and the model's context has {context}; "
            "lower max_new_tokens, or give shorter prompts"
        )
    return {batch: batched(prompts, batch, config) for batch in config.batch}, what


def batched(prompts: Sequence[list[int]], batch: int, config: BenchConfig) -> list[Request]:
    """The prompts in turn, `batch` for each request."""
    turns = itertools.cycle(map(tuple, prompts))
    lengths = [(config.warm_up_tokens, False)] if config.warm_up_tokens else []
    lengths += [(config.max_new_tokens, True)] * config.requests
    return [
        Request(tuple(itertools.islice(turns, batch)), new_tokens, is_measured)
        for new_tokens, is_measured in lengths
    ]
