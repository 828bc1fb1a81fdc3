"""An expert is requested while an earlier read of it is in flight, and that read fails."""

import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from predictors.baselines import PopularityPredictor
from runtime.errors import TransferError
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.predictors import small_spec
from tests.builders.served import serve_with_transfers

TOKENS = torch.arange(64).reshape(1, 64)
"""Enough tokens that every expert of every layer is requested."""


@pytest.mark.parametrize("host_budget", [None, "60%"])
@pytest.mark.parametrize("for_ever", [False, True])
def test_joined_read__that_fails_is_tried_once_more(tmp_path, monkeypatch, for_ever, host_budget):
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=3, num_experts=8)
    expected = plain_eager(folder)(TOKENS).logits
    spec = small_spec(num_layers=3, num_experts=8, hidden_size=32)
    asked = threading.Event()
    broken: set = set()

    def breaking(name, read):
        def transfer(task):
            if name == "disk":
                if not broken and not task.high:
                    broken.add(task.expert)
                    assert asked.wait(240)
                    raise TransferError(f"{task.expert} is broken")
                if for_ever and task.expert in broken:
                    raise TransferError(f"{task.expert} is broken")
            read(task)

        return transfer

    predictor = PopularityPredictor(spec, np.random.default_rng(0).random((3, 8)))
    options = {"budget": "40%", "host_budget": host_budget, "predictor": predictor}
    model = serve_with_transfers(folder, monkeypatch, breaking, **options)
    engine = model.moecast.engine
    wait = engine.loop.wait

    def waiting():
        if any(engine.cache.top.is_requested(expert) for expert in broken):
            asked.set()
        wait()

    monkeypatch.setattr(engine.loop, "wait", waiting)
    ends = pytest.raises(TransferError, match="is broken") if for_ever else nullcontext()
    with model.moecast, torch.no_grad():
        with ends:
            # On a busy machine its prefetch may begin only when its layer has been computed.
            while not asked.is_set():
                assert torch.equal(model(TOKENS).logits, expected)
        assert len(broken) == 1
