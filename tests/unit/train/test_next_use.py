"""The next-use forecaster: its target, what it knows while it serves, its graphs, and learning."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from collect.traces import Trace
from predictors.base import HORIZONS
from predictors.errors import PredictorError
from predictors.next_use import CONTEXT, NextUsePredictor
from tests.builders.stretches import fit_stretches
from tests.builders.traces import make_spec, make_trace
from train.data import TraceSubset, subset_rows
from train.next_use import NEVER, NextUseStack, count_to_next_use, read_stretch
from train.stretches import StretchBatches

SPEC = make_spec()
RANDOM = np.random.default_rng(3)
ROUTERS = RANDOM.standard_normal(
    (SPEC.num_layers, SPEC.num_experts, SPEC.hidden_size), dtype=np.float32
)
BIASES = RANDOM.standard_normal((SPEC.num_layers, SPEC.num_experts), dtype=np.float32)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder: Path = tmp_path_factory.mktemp("trace") / "t"
    return make_trace(folder, requests_per_unit=30)


def stirred() -> NextUseStack:
    torch.manual_seed(0)
    family = NextUseStack(SPEC, ROUTERS, BIASES, width=12).eval()
    with torch.no_grad():
        for value in family.parameters():
            value.add_(0.2 * torch.randn_like(value))
        for mean in (family.mean_LX, family.context_mean_X):
            mean.add_(torch.randn_like(mean))
        for deviation in (family.deviation_LX, family.context_deviation_X):
            deviation.mul_(1 + torch.rand_like(deviation))
    return family


def test_next_use__is_counted_in_tokens() -> None:
    used = np.array([1, 0, 0, 1, 1, 0], np.float32)[:, None, None]
    assert count_to_next_use(used).ravel().tolist() == [3, 2, 1, 1, NEVER, NEVER]


def test_next_use__far_away_is_never() -> None:
    used = np.zeros((2 * NEVER, 1, 1), np.float32)
    used[-1] = 1
    count = count_to_next_use(used).ravel().astype(int)
    assert count[-2] == 1
    assert count[-100] == 99
    assert set(count[: -NEVER - 1].tolist()) == {NEVER}


def test_forecaster__serving_token_by_token_answers_as_torch(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few different tokens, so that the same text occurs again.
    monkeypatch.setattr(trace, "tokens", trace.tokens % 3)
    family = stirred()
    predictor = family.export(SPEC)["next-use"]
    rows = subset_rows(trace, TraceSubset.FIT)
    batch = read_stretch(trace, rows, 0, 40, ROUTERS, BIASES)
    assert batch.past_LBX[..., -1].any(), "no text occurs twice: the history is not tested"
    assert len(set(trace.requests[rows[:40]].tolist())) > 1
    with torch.no_grad():
        expected = family(batch).sigmoid().numpy()
    for place, row in enumerate(rows[:40].tolist()):
        token = np.array([trace.tokens[row]], np.int64)
        predictor.begin_step(token, np.array([trace.requests[row]], np.int64))
        for layer in range(SPEC.num_layers):
            predictor.gate_input(layer, trace.column("gate_input", layer)[[row]])
            experts = trace.column("experts", layer)[[row]].astype(np.int64)
            (forecast,) = predictor.routed(layer, experts, None)
            assert forecast.layer == layer
            assert forecast.scores_TE.shape == (len(HORIZONS), SPEC.num_experts)
            np.testing.assert_allclose(
                forecast.scores_TE.ravel(), expected[layer, place], atol=4e-3
            )
        predictor.end_step()


def test_forecaster__after_a_prompt_at_once_knows_what_its_tokens_tell_one_by_one(
    trace: Trace,
) -> None:
    """In the prompt itself the context is unknown; from the next step on it is the same."""
    whole, single = (stirred().export(SPEC)["next-use"] for _ in range(2))
    show(whole, trace, 0, 9)
    for row in range(9):
        show(single, trace, row, row + 1)
    at_once, one_by_one = (show(predictor, trace, 9, 10) for predictor in (whole, single))
    for layer in range(SPEC.num_layers):
        np.testing.assert_allclose(at_once[layer], one_by_one[layer], atol=1e-5)


def show(predictor: NextUsePredictor, trace: Trace, first: int, last: int) -> list[np.ndarray]:
    """Returns the answers of every layer to a step of these rows, as of one request."""
    tokens = np.asarray(trace.tokens[first:last], np.int64)
    predictor.begin_step(tokens, np.zeros_like(tokens))
    answers = []
    for layer in range(SPEC.num_layers):
        predictor.gate_input(layer, trace.column("gate_input", layer)[first:last])
        experts = trace.column("experts", layer)[first:last].astype(np.int64)
        (forecast,) = predictor.routed(layer, experts, None)
        answers.append(forecast.scores_TE)
    predictor.end_step()
    return answers


def test_forecaster__several_requests_keep_contexts_apart(trace: Trace) -> None:
    """Two requests with the same tokens forecast what one of them does, counts apart."""
    pair = stirred().export(SPEC)["next-use"]
    contexts = []
    for row in range(6):
        rows = [row, row + 20]
        pair.begin_step(np.asarray(trace.tokens[rows], np.int64), np.array([4, 9]))
        for layer in range(SPEC.num_layers):
            pair.gate_input(layer, trace.column("gate_input", layer)[rows])
            experts = trace.column("experts", layer)[rows].astype(np.int64)
            (forecast,) = pair.routed(layer, experts, None)
            assert forecast.scores_TE.shape == (len(HORIZONS), SPEC.num_experts)
        contexts.append(pair._context_SCD[:2].copy())
        pair.end_step()
    alone = stirred().export(SPEC)["next-use"]
    for row in range(6):
        show(alone, trace, row + 20, row + 21)
    np.testing.assert_allclose(contexts[-1][1], alone._context_SCD[0], atol=1e-6)
    assert not np.allclose(contexts[-1][0], contexts[-1][1])


def test_forecaster__goes_into_files_and_back() -> None:
    predictor = stirred().export(SPEC)["next-use"]
    again = NextUsePredictor.from_files(SPEC, predictor.files(), predictor.options())
    assert again.files() == predictor.files()


def test_forecaster__of_another_model_or_incomplete_is_refused() -> None:
    files = stirred().export(SPEC)["next-use"].files()
    with pytest.raises(PredictorError, match="needs predictors/next_use_context.onnx"):
        NextUsePredictor.from_files(SPEC, {k: v for k, v in files.items() if k != CONTEXT}, {})
    graph = files["predictors/next_use_00.onnx"]
    with pytest.raises(PredictorError, match="made for another model"):
        NextUsePredictor.from_files(SPEC, files | {CONTEXT: graph}, {})


def test_family__learns_when_experts_are_used_again(trace: Trace) -> None:
    torch.manual_seed(0)
    family = NextUseStack(SPEC, ROUTERS, BIASES, width=16)
    read = partial(read_stretch, trace, routers_LED=ROUTERS, biases_LE=BIASES)
    batches = partial(StretchBatches, trace, TraceSubset.FIT, read, batch_size=64)
    losses = fit_stretches(family, batches, num_epochs=4)
    assert len(losses) == 4 * len(batches(epoch=0))
    assert np.mean(losses[-3:]) < 0.9 * losses[0]
    hits, best = family.hits(next(iter(batches(epoch=0))))
    assert hits.shape == best.shape == (SPEC.num_layers,)
    assert (hits <= best).all()
