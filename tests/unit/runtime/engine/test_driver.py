"""The forecaster of reuse eviction while a model serves: it is shown every step, what it says is
what the cache keeps by, and the output is the same."""

from pathlib import Path

import numpy as np
import pytest
import torch

from predictors.base import Forecast, Predictor, Signal
from runtime import load
from runtime.config import ModelConfig, SystemConfig
from tests.builders.models import plain_eager, tiny_qwen2_moe


class Likes(Predictor):
    """Values one expert of every layer above all others, and writes down what it was shown."""

    kind = "likes"
    signals = frozenset({Signal.GATE_INPUT, Signal.ROUTED})
    stateless = False

    def __init__(self, spec, favourite: int):
        super().__init__(spec)
        self.favourite, self.shown = favourite, []

    def begin_step(self, tokens_T, requests_T):
        self.shown.append(("begin_step", len(tokens_T)))
        return ()

    def gate_input(self, layer, hidden_TD):
        self.shown.append(("gate_input", layer))
        return ()

    def routed(self, layer, experts_TK, logits_TE):
        self.shown.append(("routed", layer))
        value = np.full((1, self.spec.num_experts), 0.1, np.float32)
        value[0, self.favourite] = 0.9
        return [Forecast(layer, value)]


def test_keeper__is_shown_each_step_and_decides_what_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_qwen2_moe(tmp_path / "m", num_layers=2)
    predictors = []

    def resolved(source, system):
        predictors.append(Likes(source.spec, favourite=5))
        return predictors[0], ""

    monkeypatch.setattr("runtime.engine.forecasters.AvailablePredictors.load_reuse", resolved)
    system = SystemConfig(name="kept", prefetch=False, eviction="reuse", reuse_predictor="x/reuse")
    tokens = torch.arange(24)[None] % 60
    model = load(
        ModelConfig(name="tiny", id=str(folder), dtype="float32"), budget="50%", system=system
    )
    with model.moecast as handle, torch.no_grad():
        steps = [model(tokens[:, t : t + 1]).logits for t in range(24)]
        cache = handle.engine.cache
        used = {(n, e) for n, e in cache.top.cache}
    (reuse_predictor,) = predictors
    assert reuse_predictor.shown[:5] == [
        ("begin_step", 1),
        ("gate_input", 0),
        ("routed", 0),
        ("gate_input", 1),
        ("routed", 1),
    ]
    assert len(reuse_predictor.shown) == 24 * 5
    plain = plain_eager(folder)
    routed = set()
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda _m, _i, out, n=n: routed.update((n, e) for e in out[2].flatten().tolist())
        )
        for n, layer in enumerate(plain.model.layers)
    ]
    with torch.no_grad():
        for t, found in enumerate(steps):
            assert torch.equal(found, plain(tokens[:, t : t + 1]).logits)
    for hook in hooks:
        hook.remove()
    # Once fetched, the favourite is never dropped: half of eight slots are enough for it.
    for layer in range(2):
        assert ((layer, 5) in used) == ((layer, 5) in routed)
    assert {(0, 5), (1, 5)} & routed
