"""`moecast zoo score`: the card's figures again on its own trace, a verdict on other prompts."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from configs.program import run_program
from predictors.base import Forecast
from tests.builders.traced_model import make_traced_model, training_options
from train.accuracy import RequestAccuracy
from train.score import Verdict
from zoo.load import find_entry


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a model, traces of two distributions and a run's entries."""
    folder = tmp_path_factory.mktemp("scored")
    make_traced_model(folder, other="shifted")
    given = [*training_options(folder, folder / "run"), "max_epochs=1", "replay_tokens=20"]
    given += ["predictor=popularity", "score_shifted=false", "figures=false", "logger=[]"]
    assert run_program("train", given) == 0
    assert run_program("train", ["reuse", *given]) == 0
    return folder


def score(trained, kind: str, trace: str, *options: str) -> int:
    entry = trained / "run/entries" / kind
    own = [f"model.id={trained / 'tiny'}", "model.name=tiny", f"trace={trained / trace}"]
    return run_program("zoo", ["score", str(entry), *own, "replay_tokens=20", *options])


def test_score__on_the_own_trace_gives_the_figures_of_the_card(trained, capsys):
    assert score(trained, "popularity", "trace", "json=true") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["trace"]["split"] == "held_out"
    assert shown["fits"] is True
    for name, value in shown["here"].items():
        assert value == pytest.approx(shown["card"][name]), name


def test_score__other_prompts_that_it_does_not_fit_end_with_1(trained, capsys):
    assert score(trained, "popularity", "shifted", "max_drop=0") == 1
    shown = capsys.readouterr()
    assert "all requests" in shown.out
    line = shown.err.splitlines()[-1]
    assert "does not fit these prompts: accuracy 0." in line
    # It is an answer, not a fault of the command.
    assert not re.search("^error|debug=true", line)
    assert "predictor=popularity trace=" in shown.err
    assert score(trained, "popularity", "shifted", "max_drop=1") == 0
    assert "it fits" in capsys.readouterr().out


def test_score__judges_the_worst_layer_too(trained, monkeypatch, capsys):
    """One layer that no longer fits hardly changes the mean of many."""
    entry = find_entry(str(trained / "run/entries/popularity"))
    metrics = {**entry.manifest.metrics, "accuracy": 0.0, "worst_layer_accuracy": 1.0}
    card = replace(entry, manifest=entry.manifest.model_copy(update={"metrics": metrics}))
    monkeypatch.setattr("train.score.find_entry", lambda _: card)
    assert score(trained, "popularity", "shifted") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"does not fit these prompts: accuracy of layer \d+ \(the worst\)", line)
    assert "; accuracy" not in line


def test_standard_error__of_a_layer_counts_its_own_tokens_only():
    by_request, requests_T = RequestAccuracy(4, num_layers=2), np.arange(4)
    scores_TE = np.tile(np.float32([1, 0]), (4, 1))
    by_request.add(Forecast(0, scores_TE), np.zeros((4, 1), int), requests_T)
    by_request.add(Forecast(1, scores_TE), np.array([[0], [1], [0], [1]]), requests_T)
    assert by_request.standard_error(0) == 0
    assert by_request.standard_error(1) == pytest.approx(np.sqrt(1 / 3 / 4))


def test_score__of_reuse_has_no_verdict(trained, capsys):
    assert score(trained, "reuse", "shifted", "json=true") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fits"] is None
    assert shown["here"].keys() == shown["card"].keys()


BAD_INPUT = [
    (["nobody/stride"], "nobody/stride"),
    (["qwen2-moe-tiny/popularity", "trace=TRACE"], "do not match"),
    (["qwen2-moe-tiny/popularity"], "was made for another model than model=tiny"),
    (["qwen2-moe-tiny/popularity", "trace=nowhere"], "nowhere"),
    (["qwen2-moe-tiny/popularity", "max_drop=-1"], "max_drop=-1"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_score__bad_input_is_one_line(trained, arguments, message, capsys):
    model = [f"model.id={trained / 'tiny'}", "model.name=tiny"]
    given = [one.replace("TRACE", str(trained / "trace")) for one in arguments]
    assert run_program("zoo", ["score", *given, *model]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_standard_error__is_that_of_requests_and_not_of_tokens():
    """Requests of which all tokens are alike know no more than one token each."""
    is_hit_R = np.random.default_rng(0).random(400) < 0.5
    tokens = 50
    requests_T = np.repeat(np.arange(400), tokens)
    by_request = RequestAccuracy(400, num_layers=1)
    scores_TE = np.tile(np.float32([1, 0]), (len(requests_T), 1))
    chosen_TK = np.where(is_hit_R[requests_T], 0, 1)[:, None]
    by_request.add(Forecast(0, scores_TE), chosen_TK, requests_T)
    assert by_request.standard_error() == pytest.approx(0.5 / np.sqrt(400), rel=0.05)
    alone = RequestAccuracy(3, num_layers=1)
    alone.add(Forecast(0, scores_TE[:2]), chosen_TK[:2], np.array([1, 1]))
    assert alone.standard_error() is None


def test_verdict__allows_chance_and_tolerance():
    for here, error in [(0.9, 0.0), (0.88, 0.0), (0.87, 0.01), (1.0, None)]:
        assert Verdict(0.9, here, error, max_drop=0.0201).fits is True
    assert Verdict(0.9, 0.87, 0.0, max_drop=0.0201).fits is False
