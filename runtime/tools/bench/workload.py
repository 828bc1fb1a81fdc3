"""Requests of a live comparison: the same for every system, the first one for warm-up."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from predictors.errors import MoecastError
from runtime.tools.bench.config import BenchConfig
from runtime.tools.verify.reference import token_prompts


@dataclass(frozen=True)
class BenchRequest:
    """One batch of prompts."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each row of the batch."""
    new_tokens: int
    """Greedy tokens to generate for each row."""
    is_measured: bool


def make_requests(config: BenchConfig, folder: Path) -> tuple[dict[int, list[BenchRequest]], str]:
    """Make the requests for each batch size; also returns a description of their prompts.

    Raises:
        MoecastError: a prompt has no tokens, or exceeds the model's context with its answer.
    """
    prompts, what = token_prompts(folder, config.prompts, seed=config.seed)
    context = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    longest = max(map(len, prompts)) + max(config.max_new_tokens, config.warm_up_tokens)
    if context is not None and longest > context:
        raise MoecastError(
            f"a prompt and its answer take {longest} tokens and the model's context has {context}; "
            "lower max_new_tokens, or give shorter prompts"
        )
    return {batch: batch_prompts(prompts, batch, config) for batch in config.batch}, what


def batch_prompts(
    prompts: Sequence[list[int]], batch: int, config: BenchConfig
) -> list[BenchRequest]:
    """Distribute the prompts in turn, `batch` to each request."""
    turns = itertools.cycle(map(tuple, prompts))
    lengths = [(config.warm_up_tokens, False)] if config.warm_up_tokens else []
    lengths += [(config.max_new_tokens, True)] * config.requests
    return [
        BenchRequest(tuple(itertools.islice(turns, batch)), new_tokens, is_measured)
        for new_tokens, is_measured in lengths
    ]
