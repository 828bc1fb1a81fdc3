"""Forced routing: the log's experts are read and computed, exactly as plain Transformers would."""

from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from runtime.engine.loading import LoadOptions, load_model
from runtime.errors import RoutingLogError
from runtime.hf.forced_routing import ForcedRouting
from runtime.hf.layers import find_moe_layers
from runtime.hf.loading import load_plain
from runtime.policy.budget import Budget
from runtime.presets import load_model_preset, load_system


@pytest.fixture(scope="module")
def plain() -> torch.nn.Module:
    return load_plain(Path("runtime/models/qwen2_moe_tiny"), dtype="auto")


def random_log(*, layers: int, experts: int = 60, top_k: int = 4, tokens: int = 7) -> np.ndarray:
    return np.random.default_rng(0).random((tokens, layers, experts)).argsort(axis=2)[..., :top_k]


def load(**options):
    model, system = load_model_preset("qwen2-moe-tiny"), load_system("on-demand")
    usual = {"model": model, "system": system, "budget": Budget.parse("20%")}
    return load_model(LoadOptions(**{**usual, **options}))


def test_forced_routing__requests_the_log_and_equals_plain_transformers(plain):
    tokens = torch.arange(1, 6)[None]
    own, layers = plain(tokens).logits, find_moe_layers(plain)
    # Only the first layers of a log with more of them are used.
    log, served = random_log(layers=len(layers) + 1), load()
    with served.moecast as handle, torch.no_grad():
        handle.engine.routed = Mock(wraps=handle.engine.routed)
        forced = [ForcedRouting(handle.layers, log), ForcedRouting(layers, log)]
        for _ in range(2):
            assert torch.equal(served(tokens).logits, plain(tokens).logits)
        for one in forced:
            one.close()
        # The second step begins at the log's sixth token and goes on with its first.
        second = [log[np.arange(5, 10) % 7, layer].tolist() for layer in range(len(layers))]
        calls = [call.args[:2] for call in handle.engine.routed.call_args_list[len(second) :]]
        requested = [(layer, experts_TK.tolist()) for layer, experts_TK in calls]
        assert requested == list(enumerate(second))
        assert torch.equal(plain(tokens).logits, own), "the routers choose again"


def test_forced_routing__leaves_predictors_out_that_look_at_states(caplog):
    with load(system=load_system("moecast"), forced_routing=True).moecast as handle:
        driver = handle.engine.driver
        assert (driver.predictor_kind, driver.reuse_predictor_kind) == ("correlation", None)
    assert "which a forced routing does not depend on" in caplog.text


OTHER_SHAPES = [
    (random_log(layers=2), "the log has 2 layers.*the model has 12 layers of 60"),
    (random_log(layers=12, experts=61, tokens=99), "experts up to 60"),
]


@pytest.mark.parametrize(("log", "words"), OTHER_SHAPES)
def test_forced_routing__refuses_a_log_of_another_shape(plain, log, words):
    with pytest.raises(RoutingLogError, match=words):
        ForcedRouting(find_moe_layers(plain), log)


def test_forced_routing__refuses_another_top_k(plain):
    forced = ForcedRouting(find_moe_layers(plain), random_log(layers=12, top_k=3))
    with closing(forced), pytest.raises(RoutingLogError, match="3 experts per token, the model 4"):
        plain(torch.tensor([[1]]))
