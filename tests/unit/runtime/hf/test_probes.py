"""The probes show what plain Transformers computes, in the order in which it does."""

import numpy as np
import pytest
import torch

from collect.errors import TraceError
from collect.recorder import check_recordable
from predictors.base import Signal
from runtime.hf.probes import Probes, RequestTracker
from tests.builders.families.build import save_family, tiny_config
from tests.builders.listeners import ProbeLog
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.served import serving


def test_probes__events_come_in_order_with_the_models_own_values(tmp_path):
    model = plain_eager(tiny_qwen2_moe(tmp_path / "model"))
    tokens, recorder = torch.tensor([[3, 1, 4], [1, 5, 9]]), ProbeLog()
    with torch.no_grad(), Probes(model, set(Signal), recorder):
        output = model(tokens, output_router_logits=True)
    names = [(name, layer) for name, layer, _ in recorder.events]
    of_layers = [(n, i) for i in range(2) for n in ("layer_input", "gate_input", "routed")]
    assert names == [("begin_step", -1), *of_layers, ("end_step", -1)]
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
        assert np.allclose(np.sqrt((entering**2).mean(-1)), 1.0, atol=1e-3)
    model(tokens)
    assert len(recorder.events) == len(names), "closed probes record nothing"


def test_probes__a_lane_that_begins_with_a_past_begins_a_request(folder):
    model, recorder = plain_eager(folder), ProbeLog()
    with torch.no_grad(), Probes(model, set(), recorder) as probes:
        past = model(torch.tensor([[3, 1, 4]]), use_cache=True).past_key_values
        model(torch.tensor([[1]]), past_key_values=past)
        probes.lane = RequestTracker()
        for token in (5, 9):
            model(torch.tensor([[token]]), past_key_values=past)
    requests = [requests_T.tolist() for _, requests_T in recorder.of("begin_step")]
    assert requests == [[0, 0, 0], [0], [1], [1]]


@pytest.mark.parametrize("name", ["switch_transformers", "nllb_moe"])
def test_probes__encoder_and_decoder_have_steps_of_their_own(tmp_path, name):
    tokens = torch.randint(4, 90, (2, 5), generator=torch.Generator().manual_seed(1))
    with serving(save_family(tmp_path, name), budget="50%") as model:
        steps = ProbeLog()
        with Probes(model, {Signal.ROUTED}, steps):
            made = model.generate(tokens, max_new_tokens=2, do_sample=False, num_beams=1)
        begun = [[tokens_T.tolist(), of_T.tolist()] for tokens_T, of_T in steps.of("begin_step")]
        assert begun[0] == [tokens.ravel().tolist(), [0] * 5 + [1] * 5]
        assert begun[1:3] == [[made[:, step].tolist(), [0, 1]] for step in range(2)]
        where = [(name, layer) for name, layer, _ in steps.events if "input" not in name]
        one_step = [("begin_step", -1), ("routed", 0), ("end_step", -1)]
        assert where[:6] == [*one_step, one_step[0], ("routed", 1), one_step[2]]

        steps = ProbeLog()
        with Probes(model, {Signal.ROUTED}, steps):
            model.generate(tokens, max_new_tokens=2, do_sample=False, num_beams=3)
            model(input_ids=tokens, decoder_input_ids=tokens[:, :2])
        requests = [requests_T.tolist() for _, requests_T in steps.of("begin_step")]
        assert requests[0] == [0] * 5 + [1] * 5
        assert requests[1] == [0, 0, 0, 1, 1, 1], "beams of a request are that request"
        assert requests[-2:] == [[2] * 5 + [3] * 5, [2, 2, 3, 3]]


def test_record__a_model_with_an_encoder_is_refused_in_words():
    with pytest.raises(TraceError, match="has an encoder"):
        check_recordable(tiny_config("switch_transformers"), [], None)
