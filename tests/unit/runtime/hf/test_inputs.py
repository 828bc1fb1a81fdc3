"""Inputs of a forward pass other than token ids, and how its past is passed."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from collect.errors import TraceError
from collect.recorder import SignalRecorder
from collect.traces.layout import TraceSignal
from predictors.base import Signal
from runtime.errors import CheckpointError
from runtime.hf import layers
from runtime.hf.adapters.base import ExpertsAdapter, read_routing
from runtime.hf.forward_pass import NO_TOKEN, find_tokens
from runtime.hf.probes import Probes, RequestTracker
from tests.builders.listeners import ProbeLog
from tests.builders.models import plain_eager
from tests.builders.served import serving

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (5,)])
def test_forward__no_tokens_are_refused_and_forecasts_go_on(folder, shape):
    with serving(folder, budget="25%", system="moecast") as model:
        with pytest.raises(CheckpointError, match="give at least one token"):
            model(torch.zeros(shape, dtype=torch.long))
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, pad_token_id=0)
        assert model.moecast.stats()["predicted"] > 0


def test_load__prompts_given_as_embeddings_are_served_bitwise(folder):
    plain = plain_eager(folder)
    tokens = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    embeddings = plain.get_input_embeddings()(tokens).detach()
    given = {"inputs_embeds": embeddings, "attention_mask": torch.ones_like(tokens), **GREEDY}
    expected, steps = plain.generate(**given), ProbeLog()
    with serving(folder, budget="25%") as model, Probes(model, {Signal.ROUTED}, steps):
        found = model.generate(**given)
        assert torch.equal(found, expected)
        with torch.no_grad():
            expected = plain(inputs_embeds=embeddings).logits
            assert torch.equal(model(inputs_embeds=embeddings).logits, expected)
    first, second, *_ = (tokens_T.tolist() for tokens_T, _ in steps.of("begin_step"))
    assert first == [NO_TOKEN] * 14
    assert second == found[:, 0].tolist(), "then the tokens that it generates"


@pytest.mark.parametrize("what", ["no router", "a router that tells nothing"])
def test_load__refuses_routers_that_cannot_be_observed(folder, monkeypatch, what):
    if what == "no router":
        monkeypatch.setattr(layers, "_find_router", lambda *_: None)
    else:
        monkeypatch.setattr(ExpertsAdapter, "routing", lambda _, out, *__: read_routing(out[:1]))
    tokens = torch.arange(1, 9).reshape(1, 8)
    expected = plain_eager(folder).generate(tokens, **GREEDY)
    with serving(folder, budget="25%") as model:
        assert torch.equal(model.generate(tokens, **GREEDY), expected)
        refused = pytest.raises(CheckpointError, match="does not return the chosen experts")
        with Probes(model, {Signal.ROUTED}, ProbeLog(), complete=True), refused:
            model(tokens)
        assert torch.equal(model.generate(tokens, **GREEDY), expected)


def test_tokens_of__nothing_to_compute_is_an_error():
    with pytest.raises(CheckpointError, match="input_ids or inputs_embeds"):
        find_tokens((), {"attention_mask": torch.ones(1, 1)})


def test_recorder__refuses_embeddings_and_unknown_tokens():
    recorder = SignalRecorder([TraceSignal.EXPERTS], end_tokens=[])
    recorder.begin_batch([0], np.ones((1, 2), dtype=bool))
    with pytest.raises(TraceError, match="input_ids"):
        recorder.begin_step(np.array([NO_TOKEN, NO_TOKEN]), np.zeros(2, dtype=np.int64))
    recorder.begin_step(np.array([1, 2]), np.zeros(2, dtype=np.int64))
    with pytest.raises(TraceError, match="computes 5 tokens"):
        recorder.routed(0, np.zeros((5, 1), dtype=np.int64), None, None)


def test_past__of_caches_that_count_and_of_those_that_do_not():
    lane = RequestTracker()
    assert not lane.has_past(None)
    cache = DynamicCache()
    assert not lane.has_past(cache)
    cache.update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), 0)
    assert lane.has_past(cache)
    # As those of models without attention.
    first, second = (Mock(**{"get_seq_length.side_effect": ValueError}) for _ in range(2))
    continued = [lane.has_past(one) for one in (first, first, second, first)]
    assert continued == [False, True, False, False]
    assert not lane.has_past(())
