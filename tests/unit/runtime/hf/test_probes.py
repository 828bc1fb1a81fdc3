"""The probes show what plain Transformers computes, in the order in which it does."""

import numpy as np
import torch

from predictors.base import Signal
from runtime.hf.probes import Probes
from tests.builders.models import plain_eager, tiny_qwen2_moe


class Recorder:
    def __init__(self):
        self.events = []

    def begin_step(self, tokens_T, requests_T):
        self.events.append(("begin", None, tokens_T.copy()))

    def layer_input(self, layer, hidden_TD):
        self.events.append(("layer_input", layer, hidden_TD.copy()))

    def gate_input(self, layer, hidden_TD):
        self.events.append(("gate_input", layer, hidden_TD.copy()))

    def routed(self, layer, experts_TK, logits_TE, weights_TK):
        self.events.append(("routed", layer, (experts_TK.copy(), logits_TE.copy(), weights_TK)))

    def end_step(self):
        self.events.append(("end", None, None))


def test_probes__events_come_in_order_with_the_models_own_values(tmp_path):
    model = plain_eager(tiny_qwen2_moe(tmp_path / "model"))
    tokens = torch.tensor([[3, 1, 4], [1, 5, 9]])
    recorder = Recorder()
    with torch.no_grad(), Probes(model, set(Signal), recorder):
        output = model(tokens, output_router_logits=True)
    names = [(name, layer) for name, layer, _ in recorder.events]
    assert names == [
        ("begin", None),
        *[(n, i) for i in range(2) for n in ("layer_input", "gate_input", "routed")],
        ("end", None),
    ]
    values = {(name, layer): value for name, layer, value in recorder.events}
    assert values["begin", None].tolist() == [3, 1, 4, 1, 5, 9]
    for layer in range(2):
        experts, logits, weights = values["routed", layer]
        gate = model.model.layers[layer].mlp.gate
        hidden = torch.from_numpy(values["gate_input", layer])
        expected = torch.nn.functional.linear(hidden, gate.weight).detach()
        assert np.allclose(logits, expected.numpy(), atol=1e-5)
        assert np.allclose(logits, output.router_logits[layer].numpy(), atol=1e-5)
        assert np.array_equal(experts, torch.from_numpy(logits).topk(2).indices.numpy())
        assert weights.shape == (6, 2)
        scale = np.sqrt((values["layer_input", layer] ** 2).mean(-1))
        assert np.allclose(scale, 1.0, atol=1e-3)
    with torch.no_grad():
        model(tokens)
    assert len(recorder.events) == len(names), "closed probes record nothing"
