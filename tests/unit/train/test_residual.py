"""The residual networks: untrained they are skip; exported they answer as torch, past included."""

from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
from torch import nn

from collect.traces import Trace, TraceSignal
from predictors import residual
from predictors.base import Forecast
from predictors.errors import PredictorError
from predictors.residual import ResidualPredictor, share_chosen
from tests.builders.traces import make_spec, make_trace
from train.data import InputSpec, TraceBatches, TraceSubset
from train.pipeline import export_predictors
from train.predictor_stack import PredictorStack
from train.residual import ResidualStack, platt

SPEC = make_spec()
ROUTERS = np.random.default_rng(1).standard_normal((4, 8, 16), dtype=np.float32)


def new_family() -> ResidualStack:
    torch.manual_seed(0)
    return ResidualStack(SPEC, ROUTERS, None, horizons=3, width=24, rank=5)


def stirred(family: PredictorStack):
    """As after training: nothing is zero."""
    with torch.no_grad():
        for value in family.parameters():
            value.add_(0.3 * torch.randn_like(value))
        for name, value in family.named_buffers():
            if "mean" in name or "shift" in name:
                value.add_(torch.randn_like(value))
            elif "deviation" in name or "scale" in name:
                value.mul_(1 + torch.rand_like(value))
    return family


def predictor_of(family: ResidualStack) -> ResidualPredictor:
    return family.export(SPEC)["residual"]


def asked(predictor: ResidualPredictor, hidden: dict, requests: list[int], experts_LTK=None):
    """Every answer of one step, in order; `hidden`: signal to `[L, T, D]`.

    The chosen experts are those with the highest logits, unless they are given.
    """
    ids = np.array(requests)
    predictor.begin_step(np.zeros_like(ids), ids)
    found: list[tuple[str, int, Forecast]] = []
    for layer in range(SPEC.num_layers):
        forecasts = predictor.layer_input(layer, hidden["layer_input"][layer])
        found += [("layer_input", layer, one) for one in forecasts]
        gate_TD = hidden["gate_input"][layer]
        assert not predictor.gate_input(layer, gate_TD)
        logits_TE = gate_TD @ ROUTERS[layer].T
        best_TK = np.argsort(-logits_TE, axis=1)[:, : SPEC.top_k]
        experts_TK = best_TK if experts_LTK is None else experts_LTK[layer]
        forecasts = predictor.routed(layer, experts_TK, logits_TE)
        found += [("gate_input", layer, one) for one in forecasts]
    return found


def random_step(num_tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shape = SPEC.num_layers, num_tokens, SPEC.hidden_size
    signals = "layer_input", "gate_input"
    return {signal: random.standard_normal(shape, dtype=np.float32) for signal in signals}


def test_residual__untrained_ranks_as_skip_does_for_every_layer_at_every_horizon() -> None:
    hidden = random_step(40)
    answers = asked(predictor_of(new_family()), hidden, list(range(40)))
    assert [(signal, layer, forecast.layer) for signal, layer, forecast in answers] == [
        *[("layer_input", 0, target) for target in (0, 1, 2)],
        *[("gate_input", 0, target) for target in (1, 2, 3)],
        *[("gate_input", 1, target) for target in (2, 3)],
        ("gate_input", 2, 3),
    ]
    for signal, layer, forecast in answers:
        logits = hidden[signal][layer] @ ROUTERS[forecast.layer].T
        expected = np.argsort(-logits, axis=1)[:, : SPEC.top_k]
        assert np.array_equal(forecast.chosen_TK(SPEC.top_k), expected)


def scores_of(answers: list[tuple[str, int, Forecast]]) -> dict[tuple[str, int, int], np.ndarray]:
    return {(signal, layer, one.layer): one.scores_TE for signal, layer, one in answers}


def test_residual__exported_answers_as_torch_over_whole_requests(trace: Trace) -> None:
    """Prompts in one step, then token by token, two requests at a time; torch sees rows alone."""
    family = stirred(new_family())
    predictor = predictor_of(family).for_all_tokens()
    needs = InputSpec(family.needs.signals, family.needs.decays)
    (batch,) = TraceBatches(trace, TraceSubset.HELD_OUT, batch_size=10_000, needs=needs)
    expected = {
        (str(answer.signal), answer.source, target): scores
        for answer in family.answers(batch)
        for target, scores in answer.scores_BE.items()
    }
    for place in (slice(0, 6), slice(6, 7), slice(7, 8), slice(8, 9), slice(9, 10)):
        rows = np.arange(2 * 10).reshape(2, 10)[:, place].ravel()
        hidden = {str(key): value.numpy()[:, rows] for key, value in batch.states.items()}
        requests = np.repeat([7, 8], len(rows) // 2).tolist()
        chosen = batch.chosen_LBK[:, rows].numpy()
        for key, scores in scores_of(asked(predictor, hidden, requests, chosen)).items():
            # Contexts are stored in half precision for training, and not at run time.
            np.testing.assert_allclose(scores, expected[key][rows], atol=5e-3)


def test_residual__a_new_request_has_no_past() -> None:
    predictor = predictor_of(stirred(new_family()))
    hidden = random_step(1)
    fresh, used, again = (scores_of(asked(predictor, hidden, [one])) for one in (1, 1, 2))
    for key, scores in fresh.items():
        assert np.array_equal(scores, again[key])
        assert not np.allclose(scores, used[key])


def test_residual__long_prompts_go_in_pieces_and_mean_the_same(monkeypatch: pytest.MonkeyPatch):
    hidden = random_step(50)
    whole, parts = windowed(None), windowed(None)
    expected = scores_of(asked(whole, hidden, [3] * 50))
    monkeypatch.setattr("predictors.residual.LONGEST_RUN", 7)
    pieces = scores_of(asked(parts, hidden, [3] * 50))
    for key, scores in expected.items():
        np.testing.assert_allclose(pieces[key], scores, atol=1e-5)


def windowed(window: int | None) -> ResidualPredictor:
    """As it is loaded from its files."""
    made = predictor_of(stirred(new_family()))
    options = made.options() | {"prompt_window": window}
    loaded = ResidualPredictor.from_files(SPEC, made.files(), options)
    assert loaded.files() == made.files()
    return loaded


def test_prompt_window__forecasts_a_prompt_as_its_last_tokens() -> None:
    prompts, then = random_step(13), random_step(2, seed=1)
    last = {signal: values[:, [*range(2, 6), *range(9, 13)]] for signal, values in prompts.items()}
    short, whole = windowed(4), windowed(None)
    expected = scores_of(asked(whole, last, [1] * 4 + [2] * 4))
    rows = [0, 0, 1, 2, 2, 3, *(4 + row for row in (0, 0, 1, 1, 2, 2, 3))]
    for key, scores in scores_of(asked(short, prompts, [1] * 6 + [2] * 7)).items():
        np.testing.assert_allclose(scores, expected[key][rows], atol=1e-6)
    following = scores_of(asked(short, then, [1, 2]))
    for key, scores in scores_of(asked(whole, then, [1, 2])).items():
        np.testing.assert_allclose(following[key], scores, atol=1e-6)


@pytest.mark.parametrize("requests", [[1], [1] * 3, [1, 2, 3], [1] * 6 + [2] * 7 + [3]])
def test_count_input_rows__are_those_that_a_network_computes(monkeypatch, requests):
    predictor = windowed(4)
    run = create_autospec(residual.Network.run, side_effect=residual.Network.run)
    monkeypatch.setattr(residual.Network, "run", run)
    asked(predictor, random_step(len(requests)), requests)
    rows = [len(call.args[2][residual.HIDDEN]) for call in run.call_args_list]
    assert sum(rows) == len(predictor.files()) * predictor.count_input_rows(np.array(requests))


@pytest.mark.parametrize("window", [0, 257])
def test_prompt_window__must_be_one_call(window: int) -> None:
    with pytest.raises(PredictorError, match=f"prompt_window={window}: must be 1 to 256"):
        windowed(window)


@pytest.mark.parametrize("kernels", [None, residual.kernels], ids=["numpy", "compiled"])
def test_share_chosen__is_the_probability_of_the_chosen_experts(monkeypatch, kernels):
    monkeypatch.setattr(residual, "kernels", kernels)
    logits = np.log(np.array([[1, 2, 3, 4]], np.float32) / 10)
    # The id 4 is no choice.
    shares = share_chosen(np.array([[3, 4, 1, 3]]), logits)
    np.testing.assert_allclose(shares, [[0, 4 * 0.2, 0, 4 * 0.4]], rtol=1e-5)
    two = share_chosen(np.array([[3, 4], [0, 1]]), np.repeat(logits, 2, axis=0))
    np.testing.assert_allclose(two, [[0, 0, 0, 0.8], [0.2, 0.4, 0, 0]], rtol=1e-5)


def test_residual__needs_the_routers_logits() -> None:
    predictor = predictor_of(new_family())
    asked(predictor, random_step(1), [0])
    with pytest.raises(PredictorError, match="the router of layer 1 gives no logits"):
        predictor.routed(1, np.zeros((1, SPEC.top_k), np.int64), None)


def test_losses__are_the_cross_entropy_with_the_targets_own_router(trace: Trace) -> None:
    family = stirred(new_family())
    batch = next(iter(TraceBatches(trace, TraceSubset.HELD_OUT, batch_size=8, needs=family.needs)))
    losses = dict(zip(family.labels, family.losses(batch).tolist(), strict=True))
    truth = (batch.states[TraceSignal.GATE_INPUT][2] @ torch.from_numpy(ROUTERS[2]).T).softmax(-1)
    expected = nn.functional.cross_entropy(family(batch)[1, :, 1], truth)
    assert family.sources[1].layer == 0
    assert losses["residual/horizon_2/layer_02"] == pytest.approx(expected.item(), rel=1e-5)


def test_residual__of_one_layer_is_trained_and_exported(tmp_path) -> None:
    trace = make_trace(tmp_path / "t", spec=make_spec(num_layers=1), num_units=1)
    family = ResidualStack(trace.spec, ROUTERS[:1], None, horizons=3)
    batch = next(iter(TraceBatches(trace, TraceSubset.FIT, batch_size=8, needs=family.needs)))
    assert family.losses(batch).isfinite().all()
    made, _ = export_predictors([family], trace)
    hidden_TD = np.ones((1, SPEC.hidden_size), np.float32)
    made["residual"].begin_step(np.zeros(1, np.int64), np.zeros(1, np.int64))
    assert [forecast.layer for forecast in made["residual"].layer_input(0, hidden_TD)] == [0]


def test_platt__counts_the_id_of_no_choice_as_no_expert() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 8, generator=random)
    chosen = (logits + torch.randn(400, 8, generator=random)).topk(1).indices
    with_none = torch.cat([chosen, torch.full_like(chosen, 8)], dim=-1)
    for one, other in zip(platt(logits, chosen), platt(logits, with_none), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("size", "noise"), [(1.0, 0.2), (1.0, 1.0), (8.0, 0.2), (8.0, 2.0)])
def test_platt__finds_the_least_loss_however_sure_the_forecast(size: float, noise: float) -> None:
    """The loss is convex: no step in any direction lowers it."""
    random = torch.Generator().manual_seed(0)
    truth = size * torch.randn(800, 60, generator=random)
    chosen = truth.topk(4).indices
    logits = truth + noise * size * torch.randn(800, 60, generator=random)
    scale, shift = (one.double() for one in platt(logits, chosen))
    z = logits.double().log_softmax(-1)
    happened = torch.zeros_like(z).scatter(-1, chosen, 1.0)

    def loss(a: float, b: float) -> float:
        said = scale * a * (z + b) + shift
        return nn.functional.binary_cross_entropy_with_logits(said, happened).item()

    for a, b in ((0.9, 0.0), (1.1, 0.0), (1.0, -0.2), (1.0, 0.2), (0.9, -0.2), (1.1, 0.2)):
        assert loss(1.0, 0.0) < loss(a, b)
