"""The reuse forecaster: its target, its features while it serves, its graphs, and that it keeps
what is used again."""

from functools import partial

import numpy as np
import pytest
import torch

from predictors.reuse import ReusePredictor
from tests.builders.traces import make_spec
from tests.unit.train.test_residual import stirred
from train.data import TraceSubset, subset_rows
from train.reuse import ReuseBatches, ReuseStack, future, read_stretch

SPEC = make_spec()


def new_family() -> ReuseStack:
    torch.manual_seed(0)
    return stirred(ReuseStack(SPEC, width=12))


def test_future__is_the_discounted_share_of_what_comes() -> None:
    used = np.random.default_rng(2).integers(0, 2, (6, 2, 3)).astype(np.float32)
    value = future(used, 0.7)
    for row in range(6):
        expected = sum((0.3 / 0.7) * 0.7**ahead * used[row + ahead] for ahead in range(1, 6 - row))
        np.testing.assert_allclose(value[row], expected + np.zeros((2, 3)), atol=1e-6)


def test_forecaster__serving_token_by_token_answers_as_torch(trace) -> None:
    family = new_family()
    made = family.export(SPEC)["reuse"]
    predictor = ReusePredictor.from_files(SPEC, made.files(), made.options())
    assert predictor.files() == made.files()
    rows = subset_rows(trace, TraceSubset.FIT)
    with torch.no_grad():
        expected = family(read_stretch(trace, rows, 0, 12).batch(np.arange(12))).sigmoid().numpy()
    for place, row in enumerate(rows[:12].tolist()):
        predictor.begin_step(np.zeros(1, np.int64), np.array([trace.requests[row]], np.int64))
        for layer in range(SPEC.num_layers):
            predictor.gate_input(layer, trace.column("gate_input", layer)[[row]])
            experts = trace.column("experts", layer)[[row]].astype(np.int64)
            logits = trace.column("gate_logits", layer)[[row]].astype(np.float32)
            (forecast,) = predictor.routed(layer, experts, logits)
            assert forecast.layer == layer
            np.testing.assert_allclose(forecast.scores_TE[0], expected[layer, place], atol=2e-3)


@pytest.mark.parametrize("requests", [[1], [1] * 100, [1, 2, 3], [1] * 6 + [2] * 7])
def test_count_input_rows__are_the_tokens_that_it_counts(requests: list[int]) -> None:
    predictor, ids = new_family().export(SPEC)["reuse"], np.array(requests)
    predictor.begin_step(ids, ids)
    assert predictor.count_input_rows(ids) == len(ids[predictor._rows])


def test_family__learns_which_experts_are_used_again(trace) -> None:
    torch.manual_seed(0)
    family = ReuseStack(SPEC, width=16)
    batches = partial(ReuseBatches, trace, TraceSubset.FIT, batch_size=64)
    family.normalise_by(next(iter(batches(epoch=0))))
    optimiser = torch.optim.AdamW(family.parameters(), lr=1e-2)
    losses = []
    for epoch in range(6):
        for batch in batches(epoch=epoch):
            loss = family.losses(batch).sum()
            losses.append(loss.item())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    assert len(losses) == 6 * len(batches(epoch=0))
    assert np.mean(losses[-3:]) < 0.9 * losses[0]
