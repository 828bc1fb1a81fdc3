"""The probes show what plain Transformers computes, in the order in which it does."""

import numpy as np
import torch

from predictors.base import Signal
from runtime.hf.probes import Probes, RequestTracker
from tests.builders.listeners import ProbeLog
from tests.builders.models import plain_eager, tiny_qwen2_moe


def test_probes__events_come_in_order_with_the_models_own_values(tmp_path):
    model = plain_eager(tiny_qwen2_moe(tmp_path / "model"))
    tokens = torch.tensor([[3, 1, 4], [1, 5, 9]])
    recorder = ProbeLog()
    with torch.no_grad(), Probes(model, set(Signal), recorder):
        output = model(tokens, output_router_logits=True)
    names = [(name, layer) for name, layer, _ in recorder.events]
    assert names == [
        ("begin_step", -1),
        *[(n, i) for i in range(2) for n in ("layer_input", "gate_input", "routed")],
        ("end_step", -1),
    ]
    assert recorder.of("begin_step")[0][0].tolist() == [3, 1, 4, 1, 5, 9]
    for layer in range(2):
        ((experts, logits, weights),) = recorder.of("routed", layer)
        ((entering,),) = recorder.of("layer_input", layer)
        ((gated,),) = recorder.of("gate_input", layer)
        gate = model.model.layers[layer].mlp.gate
        expected = torch.nn.functional.linear(torch.from_numpy(gated), gate.weight).detach()
        assert np.allclose(logits, expected.numpy(), atol=1e-5)
        assert np.allclose(logits, output.router_logits[layer].numpy(), atol=1e-5)
        assert np.array_equal(experts, torch.from_numpy(logits).topk(2).indices.numpy())
        assert weights.shape == (6, 2)
        scale = np.sqrt((entering**2).mean(-1))
        assert np.allclose(scale, 1.0, atol=1e-3)
    with torch.no_grad():
        model(tokens)
    assert len(recorder.events) == len(names), "closed probes record nothing"


def test_probes__a_lane_that_begins_with_a_past_begins_a_request(tmp_path):
    model = plain_eager(tiny_qwen2_moe(tmp_path / "model"))
    recorder = ProbeLog()
    with torch.no_grad(), Probes(model, set(), recorder) as probes:
        past = model(torch.tensor([[3, 1, 4]]), use_cache=True).past_key_values
        model(torch.tensor([[1]]), past_key_values=past)
        probes.lane = RequestTracker()
        for token in (5, 9):
            model(torch.tensor([[token]]), past_key_values=past)
    requests = [requests_T.tolist() for _, requests_T in recorder.of("begin_step")]
    assert requests == [[0, 0, 0], [0], [1], [1]]
