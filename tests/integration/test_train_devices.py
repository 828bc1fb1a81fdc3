"""`moecast train devices=2`: two processes with half of every batch each, and one result."""

import json

import pytest

from tests.builders.processes import run_python
from tests.builders.traced_model import make_traced_model, training_options

RAY = ("devices=2", "launcher=ray")


@pytest.mark.engines
@pytest.mark.timeout(1200)
def test_train__two_devices_learn_what_one_learns(tmp_path) -> None:
    make_traced_model(tmp_path)
    found = {}
    # The third: two processes that Ray Train has started.
    for name, options in {1: ("devices=1",), 2: ("devices=2",), 3: RAY}.items():
        run_dir = tmp_path / f"run{name}"
        given = [*training_options(tmp_path, run_dir), "score_shifted=false", *options]
        environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = ("-m", "train", "predictor=mlp", *given)
        done = run_python(*command, environment=environment, timeout=600)
        # The other device's process ends with the training: everything after it is printed once.
        assert done.stderr.count("zoo entries:") == 1, done.stderr
        found[name] = json.loads((run_dir / "results.json").read_text())
    one = found[1]
    for other in (found[2], found[3]):
        assert one["training"]["steps"] == other["training"]["steps"]
        # A mean of two halves' gradients is the whole batch's, but for rounding.
        for kind in ("mlp", "stride"):
            assert other["predictors"][kind]["mean_accuracy"] == pytest.approx(
                one["predictors"][kind]["mean_accuracy"], abs=0.01
            )
    assert found[2]["training"]["weights_digest"] == found[3]["training"]["weights_digest"]
