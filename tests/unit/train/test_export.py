"""ONNX graphs against torch on the same inputs."""

import numpy as np
import pytest
import torch

from collect.traces import TraceSignal
from tests.builders.traces import make_spec
from train.data import Batch
from train.errors import ParityError
from train.networks import PlainStack, network_specs
from train.pipeline import LEAST_PARITY, check_parity

SPEC = make_spec(num_layers=3)
EDGES = network_specs(SPEC, ("mlp", "stride", "pre-attention"))


def random_family() -> PlainStack:
    torch.manual_seed(0)
    family = PlainStack(SPEC, EDGES, width=24, loss="bce")
    with torch.no_grad():
        family.stack.weight_out_NFE.mul_(20)
    family.normalise_by(batch(50))
    return family


def batch(num_tokens: int, seed: int = 0) -> Batch:
    random = torch.Generator().manual_seed(seed)
    shape = SPEC.num_layers, num_tokens, SPEC.hidden_size
    chosen = torch.zeros(SPEC.num_layers, num_tokens, SPEC.top_k, dtype=torch.int64)
    states = {
        signal: torch.randn(shape, generator=random)
        for signal in (TraceSignal.GATE_INPUT, TraceSignal.LAYER_INPUT)
    }
    return Batch(chosen, states)


@pytest.mark.parametrize("num_tokens", [1, 3, 257])
def test_export__answers_as_torch_for_any_number_of_tokens(num_tokens: int) -> None:
    family = random_family()
    exported = family.export(SPEC)
    hidden = torch.randn(num_tokens, SPEC.hidden_size)
    with torch.no_grad():
        expected = family.stack(hidden.expand(len(EDGES), -1, -1)).sigmoid()
    for n, edge in enumerate(EDGES):
        predictor = exported[edge.kind]
        event = predictor.layer_input if edge.kind == "pre-attention" else predictor.gate_input
        (forecast,) = event(edge.source, hidden.numpy())
        assert forecast.layer == edge.target
        np.testing.assert_allclose(forecast.scores_TE, expected[n].numpy(), atol=1e-5)


def test_parity__finds_the_same_sets_on_every_token() -> None:
    family = random_family()
    found = check_parity(family, family.export(SPEC), [batch(100), batch(100, seed=1)], top_k=2)
    assert [found[kind].tokens for kind in ("mlp", "stride", "pre-attention")] == [400, 200, 600]
    assert found["mlp"].same_top_k >= LEAST_PARITY
    assert found["mlp"].max_abs_difference < 1e-5


def test_parity__refuses_networks_that_answer_otherwise() -> None:
    family = random_family()
    exported = family.export(SPEC)
    stride = next(n for n, edge in enumerate(EDGES) if edge.kind == "stride")
    with torch.no_grad():
        family.stack.weight_out_NFE[stride].neg_()
    with pytest.raises(ParityError, match=r"stride networks.*at least 99.9%"):
        check_parity(family, exported, [batch(100)], top_k=2)
