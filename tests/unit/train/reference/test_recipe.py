"""The reference model's recipe: optimiser, losses, windows and audit against plain versions."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from predictors.errors import MoecastError
from train.reference import fit
from train.reference.audit import entropy_share, lru_hit_rate, ngram_losses
from train.reference.commands import prepare
from train.reference.config import FitConfig, ReferenceConfig
from train.reference.corpus import chat, is_held_out


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (5, 6, 12)])
def test_orthogonalise__singular_values_come_near_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(fit.orthogonalise(matrices))
    assert values.min() > 0.3
    assert values.max() < 1.4


def test_muon__a_stack_moves_as_its_matrices_one_by_one():
    start, gradient = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(1))
    stack = torch.nn.Parameter(start.clone())
    single = [torch.nn.Parameter(matrix.clone()) for matrix in start]
    together, apart = fit.Muon([stack], lr=0.1), fit.Muon(single, lr=0.1)
    for _ in range(3):
        stack.grad = gradient.clone()
        for parameter, part in zip(single, gradient, strict=True):
            parameter.grad = part.clone()
        together.step()
        apart.step()
    assert torch.allclose(stack, torch.stack(list(single)), atol=1e-5)


def test_checkpoint__restores_weights_and_optimisers(tmp_path):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 4))
        weight, bias = model.parameters()
        return model, [fit.Muon([weight], lr=0.1), torch.optim.AdamW([bias], lr=0.1)]

    def step(model, optims):
        for optimiser in optims:
            optimiser.zero_grad()
        model(torch.ones(2, 6)).square().sum().backward()
        for optimiser in optims:
            optimiser.step()

    whole, resumed = make(), make()
    assert fit.restore(tmp_path, *resumed) == 0
    step(*whole)
    fit.save(tmp_path, *whole, 1)
    assert fit.restore(tmp_path, *resumed) == 1
    for one in (whole, resumed):
        step(*one)
    for one, other in zip(whole[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_balance_losses__are_one_for_even_routing_and_more_otherwise():
    balance, _ = fit.balance_losses((torch.eye(4).repeat(5, 1) * 3,), top_k=1)
    assert balance.item() == pytest.approx(1.0, abs=1e-5)
    collapsed = torch.tensor([[9.0, 0.0, 0.0, 0.0]]).repeat(20, 1)
    assert fit.balance_losses((collapsed,), top_k=1)[0].item() > 3.9


def test_learning_rate__rises_stays_and_falls_to_zero():
    config = FitConfig(steps=1000)
    factors = [fit.learning_rate(step, config) for step in (4, 49, 300, 800, 900, 1000)]
    assert factors == [0.1, 1.0, 1.0, 1.0, 0.5, 0.0]


def test_windows__a_pass_sees_every_window_once():
    config = FitConfig(batch_size=2, context=4)
    tokens = np.arange(33, dtype=np.uint16)
    rows = torch.cat([fit.windows(tokens, config, step) for step in range(4)])
    assert sorted(rows[:, 0].tolist()) == [0, 4, 8, 12, 16, 20, 24, 28]
    assert torch.equal(rows[:, 1:] - rows[:, :-1], torch.ones(8, 4, dtype=torch.int64))
    assert torch.equal(fit.windows(tokens, config, 2), fit.windows(tokens, config, 2))


def test_ngram_losses__are_what_counting_by_hand_gives():
    train = np.array([0, 1, 0, 1, 0, 2], dtype=np.uint16)
    found = ngram_losses(train, np.array([0, 1, 2], dtype=np.uint16), vocab=3)
    unigram = {0: 4 / 9, 1: 3 / 9, 2: 2 / 9}
    assert found["unigram"] == pytest.approx(-(math.log(unigram[1]) + math.log(unigram[2])) / 2)
    after_0, after_1 = 0.75 * 2 / 3 + 0.25 * unigram[1], 0.25 * unigram[2]
    assert found["bigram"] == pytest.approx(-(math.log(after_0) + math.log(after_1)) / 2)


def test_audit__entropy_and_lru_by_hand():
    assert entropy_share(np.array([5, 5, 5, 5])) == pytest.approx(1.0)
    assert entropy_share(np.array([9, 0, 0, 0])) == pytest.approx(0.0)
    # capacity 2: misses 0 1, hits 0, misses 2 (drops 1), misses 1 (drops 0), hit 2
    assert lru_hit_rate(np.array([[0], [1], [0], [2], [1], [2]]), 2) == pytest.approx(2 / 6)


def test_corpus__split_goes_by_content_and_takes_its_share():
    assert 40 <= Counter(is_held_out(chat(str(i), "answer")) for i in range(4_000))[True] <= 130
    # The published model's split: the same documents on every machine and in every run.
    assert [i for i in range(200) if is_held_out(str(i))] == [51, 55, 152, 178]


def test_prepare__without_a_corpus_names_the_options(tmp_path):
    with pytest.raises(MoecastError, match=r"corpus\.root=PATH"):
        prepare(ReferenceConfig(), tmp_path)
