"""In every family the probes report what the experts are called with, layer by layer."""

import numpy as np
import pytest
import torch

from predictors.base import Signal
from runtime.hf.layers import find_moe_layers
from runtime.hf.probes import Probes
from tests.builders.families.build import tiny_model
from tests.builders.families.table import FAMILIES
from tests.builders.listeners import ProbeLog

SERVED = [family for family in FAMILIES.values() if not family.refused]


@pytest.mark.parametrize("family", SERVED, ids=[family.name for family in SERVED])
def test_probes__report_what_the_experts_are_called_with(family):
    model = tiny_model(family)
    model.set_experts_implementation("eager")
    layers = find_moe_layers(model)
    called = {}
    for layer in layers:
        called[layer.index] = []
        layer.experts.register_forward_pre_hook(
            lambda _module, args, kwargs, seen=called[layer.index]: seen.append(
                [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            ),
            with_kwargs=True,
        )
    heard = ProbeLog()
    tokens = torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    decoder = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad(), Probes(model, set(Signal), heard, complete=True):
        model(input_ids=tokens, **decoder)
    begun = heard.of("begin_step")
    assert len(begun) == len(heard.of("end_step")) == (2 if decoder else 1)
    for tokens_T, requests_T in begun:
        assert np.array_equal(tokens_T, tokens.reshape(-1))
        assert requests_T.shape == tokens_T.shape
    for layer in layers:
        routed = heard.of("routed", layer.index)
        for experts_TK, logits_TE, weights_TK in routed:
            num_tokens = len(experts_TK)
            # A diffusion model's decoder computes a canvas of tokens that are not in the input.
            if not hasattr(model.config, "canvas_length"):
                assert num_tokens == len(begun[0][0])
            assert experts_TK.min() >= 0
            assert logits_TE is None or logits_TE.shape == (num_tokens, layer.num_experts)
            assert weights_TK is None or weights_TK.shape == experts_TK.shape
            for name in ("layer_input", "gate_input"):
                assert len(heard.of(name, layer.index)[0][0]) == num_tokens
        if family.served == "interface":
            for (experts_TK, _, weights_TK), arguments in zip(
                routed, called[layer.index], strict=True
            ):
                assert np.array_equal(experts_TK, arguments[1].numpy())
                assert np.array_equal(weights_TK, arguments[2].float().numpy())
    assert len(heard.chosen()) >= 2
