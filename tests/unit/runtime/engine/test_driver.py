"""The forecaster of reuse eviction while a model serves: it is shown every step, and what it says
is what the cache keeps by. `test_moecast_system` has the output."""

import numpy as np
import torch

from predictors.base import Forecast, Signal
from runtime.config import SystemConfig
from tests.builders.models import tiny_qwen2_moe
from tests.builders.predictors import SignalLog
from tests.builders.served import serving

FAVOURITE = 5


class Likes(SignalLog):
    """Values one expert of every layer above all others, and writes down what it was shown."""

    kind = "likes"
    signals = frozenset({Signal.GATE_INPUT, Signal.ROUTED})
    stateless = False

    def routed(self, layer, experts_TK, logits_TE):
        self._keep(layer, experts=experts_TK)
        value = np.full((1, self.spec.num_experts), 0.1, np.float32)
        value[0, FAVOURITE] = 0.9
        return [Forecast(layer, value)]


def test_keeper__is_shown_each_step_and_decides_what_stays(tmp_path, monkeypatch):
    folder = tiny_qwen2_moe(tmp_path / "m", num_layers=2)
    place = "runtime.engine.forecasters.AvailablePredictors.load_reuse"
    monkeypatch.setattr(place, lambda source, _: (Likes(source.spec), ""))
    system = SystemConfig(name="kept", prefetch=False, eviction="reuse", reuse_predictor="x/reuse")
    tokens = torch.arange(24)[None] % 60
    with serving(folder, budget="50%", system=system) as model, torch.no_grad():
        for t in range(24):
            model(tokens[:, t : t + 1])
        used = {(n, e) for n, e in model.moecast.engine.cache.top.cache}
        reuse_predictor = model.moecast.engine.driver._reuse_guard.predictor
    shown = [[(name, layer) for name, layer, _ in step] for step in reuse_predictor.steps]
    layers = [(name, layer) for layer in range(2) for name in ("gate_input", "experts")]
    assert shown == [[("tokens", -1), ("requests", -1), *layers]] * 24
    events = [event for step in reuse_predictor.steps for event in step]
    routed = {(n, int(e)) for name, n, rows in events if name == "experts" for e in rows.flat}
    # Once fetched, the favourite is never dropped: half of eight slots are enough for it.
    favourites = {(layer, FAVOURITE) for layer in range(2)}
    assert favourites & used == favourites & routed != set()
