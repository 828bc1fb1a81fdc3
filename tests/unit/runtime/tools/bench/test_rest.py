"""Measured requests begin when what the warm-up left to fetch has arrived."""

import torch

from runtime.engine.monitor import EngineMonitor
from runtime.tools.bench.serve import wait_for_links
from tests.builders.served import serving


def test_links__that_fill_memory_in_idle_time_are_awaited(tiny) -> None:
    with serving(tiny, budget="100%", predictor="skip") as model:
        model.generate(torch.arange(1, 4)[None], max_new_tokens=2, do_sample=False, pad_token_id=0)
        wait_for_links(model.moecast.engine)
        (tier,) = EngineMonitor(model.moecast.engine).snapshot().tiers
        before = model.moecast.stats()["bytes_moved"]
        model.generate(torch.arange(9, 20)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert model.moecast.stats()["bytes_moved"] == before
    assert (tier.num_used, tier.num_in_flight) == (tier.num_slots, 0)


def test_links__at_rest_are_not_waited_for(tiny) -> None:
    with serving(tiny, system="on-demand", budget="50%") as model:
        wait_for_links(model.moecast.engine)
        assert model.moecast.stats()["bytes_moved"] == 0
