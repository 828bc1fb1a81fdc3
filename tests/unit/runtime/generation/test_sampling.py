"""Logits processors, by hand."""

import math

import pytest
import torch

from runtime.generation.sampling import FiniteScores, SamplingParams, make_logits_processors

LOGITS = torch.tensor([[0.5, -1.0, 2.0, 0.0, 1.5]])
TOKENS = torch.tensor([[4, 4, 2, 0, 0]])
"""Two tokens of the prompt, then three generated ones."""


PROCESSED = [
    ({}, [0.5, -1.0, 2.0, 0.0, 1.5]),
    # Of generated tokens only.
    ({"frequency_penalty": 0.5, "presence_penalty": 1.0}, [-1.5, -1.0, 0.5, 0.0, 1.5]),
    # Of the prompt's, too.
    ({"repetition_penalty": 2.0}, [0.25, -1.0, 1.0, 0.0, 0.75]),
    ({"logit_bias": {1: 100.0, 3: -2.0}}, [0.5, 99.0, 2.0, -2.0, 1.5]),
    # Three tokens are generated.
    ({"min_tokens": 3, "stop_token_ids": frozenset({2})}, [0.5, -1.0, 2.0, 0.0, 1.5]),
    ({"min_tokens": 4, "stop_token_ids": frozenset({2})}, [0.5, -1.0, -math.inf, 0.0, 1.5]),
]


@pytest.mark.parametrize(("options", "expected"), PROCESSED)
def test_processors__by_hand(options, expected) -> None:
    sampling, cpu = SamplingParams(max_new_tokens=8, **options), torch.device("cpu")
    chosen = make_logits_processors(sampling, num_prompt=2, recorder=None, device=cpu)
    assert chosen(TOKENS, LOGITS.clone())[0].tolist() == pytest.approx(expected)


NONE, SOME = ([math.nan] * 4, 0), ([0.0, math.nan, 2.0, 1.0], 2)
BEST = [NONE, SOME, ([0.0, math.inf, 2.0, 1.0], 1), ([-math.inf] * 4, 0)]


@pytest.mark.parametrize(("scores", "best"), BEST)
def test_finite_scores__leave_the_best_where_nothing_can_be_drawn(scores, best) -> None:
    row = FiniteScores()(torch.zeros((1, 1), dtype=torch.long), torch.tensor([scores]))
    assert torch.multinomial(row.softmax(-1), 8, replacement=True).unique().tolist() == [best]


def test_finite_scores__change_no_other_row() -> None:
    scores = torch.tensor([[0.5, -math.inf, 2.0]])
    assert FiniteScores()(torch.zeros((1, 1), dtype=torch.long), scores) is scores
