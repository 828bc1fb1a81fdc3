"""Memory of a device that does not suffice or is given back, and steps that fail in using it."""

import gc

import pytest
import torch

from runtime.config import Exact
from runtime.errors import BudgetError, CheckpointError
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.served import count_pins, serve

TOKENS = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_qwen2_moe(tmp_path_factory.mktemp("model"), num_layers=3, num_experts=12)


def restrict(sim, num_bytes: int) -> None:
    gc.collect()
    sim.memories[0].num_bytes = sim.memories[0].used_bytes + num_bytes


def dense_bytes(folder, sim) -> int:
    with serve(folder, device="sim", budget="20%", host_budget="20%").moecast as handle:
        return sim.memories[0].used_bytes - handle.engine.arenas[0].num_bytes


def test_load__a_budget_beyond_the_device_is_named(folder, sim):
    restrict(sim, dense_bytes(folder, sim) + 50_000)
    with pytest.raises(BudgetError, match=r"36 experts of \d+ bytes do not fit on sim.*=auto"):
        serve(folder, device="sim", budget="100%")
    with serve(folder, device="sim", budget="20%").moecast as handle:
        assert 2 * handle.engine.arenas[0].num_bytes > 50_000


def test_load__weights_beyond_the_device_are_named(folder, sim):
    restrict(sim, dense_bytes(folder, sim) // 2)
    with pytest.raises(CheckpointError, match=r"other than experts take \d+ bytes, which sim"):
        serve(folder, device="sim", budget="20%")


def test_load__auto_is_what_the_device_leaves(folder, sim):
    restrict(sim, 340 << 20)  # 300 MiB are left to the process
    model = serve(folder, device="sim", budget="auto")
    with model.moecast as handle:
        assert handle.engine.arenas[0].device == torch.device("sim:0")
        model.generate(TOKENS.to("sim"), max_new_tokens=3)


def test_close__gives_every_byte_back(folder, sim):
    gc.collect()
    before = sim.memories[0].used_bytes
    for _ in range(2):
        model = serve(folder, device="sim", budget="30%")
        with model.moecast:
            model(TOKENS.to("sim"))
        del model
        gc.collect()
        assert sim.memories[0].used_bytes == before


@pytest.mark.parametrize("exact", [Exact.EAGER, Exact.GROUPED])
def test_prompt__that_is_too_long_fails_alone(folder, sim, exact):
    model, tokens = serve(folder, device="sim", budget="30%", exact=exact), TOKENS.to("sim")
    with model.moecast as handle:
        expected = model(tokens).logits
        restrict(sim, 300_000)
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.ones(1, 1500, dtype=torch.long, device="sim"))
        gc.collect()
        assert torch.equal(model(tokens).logits, expected)
        assert count_pins(handle.engine) == 0


@pytest.mark.parametrize("exact", [Exact.EAGER, Exact.GROUPED])
def test_step__that_fails_within_an_expert_leaves_no_copy_unordered(
    folder, sim, monkeypatch, exact
):
    """The copies that follow overwrite slots that its kernels may still read."""
    model, tokens = serve(folder, device="sim", budget="20%", exact=exact), TOKENS.to("sim")
    with model.moecast as handle:
        expected = model(tokens).logits

        def fail(_gate_up):
            raise torch.OutOfMemoryError("injected")

        for layer in 2 * handle.layers:
            model.generate(tokens[:1], max_new_tokens=3, pad_token_id=0)
            with monkeypatch.context() as broken:
                broken.setattr(layer.experts, "_apply_gate", fail)
                with pytest.raises(torch.OutOfMemoryError, match="injected"):
                    model(tokens)
        assert torch.equal(model(tokens).logits, expected)
    assert not sim.races


def test_reload__is_bitwise_the_same(folder, device):
    expected = plain_eager(folder).to(device)(TOKENS.to(device)).logits
    for _ in range(2):
        model = serve(folder, device=device, budget="30%", exact=Exact.EAGER)
        with model.moecast:
            assert torch.equal(model(TOKENS.to(device)).logits, expected)
