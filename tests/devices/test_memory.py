"""Memory of a device that does not suffice or is given back, and steps that fail in using it."""

import gc
import io
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from openai import BadRequestError

from runtime.accelerator import open_accelerator, pin_exact_sizes
from runtime.commands import chat, generate
from runtime.config import Exact, GenerateConfig
from runtime.engine.assembly import HOST_SHARE
from runtime.errors import BudgetError, CheckpointError, StepMemoryError
from runtime.generation.config import ChatConfig
from runtime.serving.config import ServeConfig
from runtime.serving.served_model import load_model
from tests.builders.models import tiny_qwen2_moe
from tests.builders.served import count_pins, serve, serving
from tests.builders.serving import running_server

TOKENS = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(3))


def restrict(sim, num_bytes: int) -> None:
    gc.collect()
    sim.memories[0].restrict(num_bytes)


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


def test_load__auto_reuses_what_pytorch_keeps(folder, sim):
    restrict(sim, 340 << 20)  # 300 MiB are left to the process
    torch.zeros(60 << 20, dtype=torch.uint8, device="sim")
    with serving(folder, device="sim", budget="auto") as model:
        assert model.moecast.engine.arenas[0].device == torch.device("sim:0")
        model.generate(TOKENS.to("sim"), max_new_tokens=3)


@pytest.mark.usefixtures("sim")
def test_load__several_processes_share_the_host_memory_of_their_machine(folder, monkeypatch):
    with serve(folder, budget="100%").moecast as handle:
        expert_bytes = handle.budget_bytes // 36
    free = SimpleNamespace(available=int(10.5 * expert_bytes / HOST_SHARE))
    monkeypatch.setattr("runtime.engine.memory.psutil.virtual_memory", lambda: free)
    monkeypatch.setattr("runtime.hf.ranks.find_own_part", lambda *_, **__: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for shares, num_slots in ((False, 10), (True, 5)):
        options = {"device": "sim", "budget": "20%", "expert_parallel": shares}
        with serve(folder, **options).moecast as handle:
            assert handle.engine.arenas[1].num_slots == num_slots


def test_load__pins_no_more_than_the_host_budget(tmp_path, sim):
    folder = tiny_qwen2_moe(tmp_path / "model", num_experts=12, expert_width=1024)
    with serve(folder, device="sim", budget="20%", host_budget="70%").moecast as handle:
        host = handle.engine.arenas[1].num_bytes
    assert host > 1 << 20
    assert host <= sim.largest_pin <= host + 4096


@pytest.mark.usefixtures("sim")
def test_load__keeps_the_allocator_settings_of_the_user():
    """Those of the device are reset where a change does not repeat them."""
    given = "garbage_collection_threshold:0.5,pinned_max_cached_size_mb:7"
    before = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings(given)
    pin_exact_sizes.cache_clear()
    open_accelerator(torch.device("sim", 0))
    settings = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings(before)
    pin_exact_sizes.cache_clear()
    assert settings.endswith(given), "the last of two counts"


def test_close__gives_every_byte_back(folder, sim):
    gc.collect()
    before = sim.memories[0].used_bytes
    for _ in range(2):
        with serving(folder, device="sim", budget="30%") as model:
            model(TOKENS.to("sim"))
        del model
        gc.collect()
        assert sim.memories[0].used_bytes == before


@pytest.mark.parametrize("exact", [Exact.EAGER, Exact.GROUPED])
def test_prompt__that_is_too_long_fails_alone_and_names_a_budget_for_it(tmp_path, sim, exact):
    folder = tiny_qwen2_moe(tmp_path / "model", num_experts=12, expert_width=1024)
    tokens, long = TOKENS.to("sim"), torch.ones(1, 150, dtype=torch.long, device="sim")
    with serving(folder, device="sim", budget="100%", exact=exact) as model:
        expected = model(tokens).logits
        restrict(sim, 1_000_000)
        with pytest.raises(StepMemoryError, match=r"on sim:0: a step of 150 tokens") as failed:
            model(long)
        assert torch.equal(model(tokens).logits, expected)
        assert count_pins(model.moecast.engine) == 0
    budget = re.search(r"budget=(\d+)", str(failed.value))
    del model, failed
    gc.collect()
    with serving(folder, device="sim", budget=int(budget[1]), exact=exact) as model:
        model(long)


def test_prompt__for_which_no_budget_leaves_memory_is_named(folder, sim):
    with serving(folder, device="sim", budget="30%") as model:
        restrict(sim, 300_000)
        with pytest.raises(StepMemoryError, match="No budget leaves it; take a shorter prompt"):
            model(torch.ones(1, 1500, dtype=torch.long, device="sim"))


def test_server__goes_on_after_a_prompt_that_is_too_long(speaking, sim):
    config = ServeConfig(model=speaking, device="sim", budget="40%", host_budget="70%")

    def load():
        loaded = load_model(config)
        restrict(sim, 400_000)
        return loaded

    with running_server(load) as server:
        complete = partial(server.openai().completions.create, model="tiny", max_tokens=3)
        with pytest.raises(BadRequestError, match="out of memory on sim:0: a step of") as refused:
            complete(prompt="One, two, " * 300)
        assert refused.value.code == "context_length_exceeded"
        assert complete(prompt="The sky is").usage.completion_tokens == 3


def test_generate_and_chat__say_that_a_prompt_is_too_long(speaking, sim, monkeypatch, capsys):
    shared = {"model": speaking, "device": "sim", "budget": "40%", "max_new_tokens": 3}
    for command in (chat, generate):
        monkeypatch.setattr(command, "freeze_objects", lambda: restrict(sim, 400_000))
    with pytest.raises(StepMemoryError, match="out of memory on sim:0: a step of"):
        generate.run(GenerateConfig(prompt="One, two, " * 300, **shared))
    restrict(sim, 1 << 29)
    monkeypatch.setattr("sys.stdin", io.StringIO("One, two, " * 300 + "\nThe sky is\n"))
    assert chat.run(ChatConfig(**shared))["num_answers"] == 1
    assert "error: out of memory on sim:0: a step of" in capsys.readouterr().err


def test_close__waits_for_the_copies_under_way(folder, sim):
    """Their target goes back to the stream of the computation."""
    sim.random.random = lambda: 1.0
    with serving(folder, device="sim", budget="50%", system="promoe", predictor="skip") as model:
        engine = model.moecast.engine
        engine.cache.top.prefetch((0, 0), 1.0)
        while not engine.loop.links[0].ring.running():
            engine.move_when_idle()
    del model, engine
    gc.collect()
    assert not sim.races


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("injected"), KeyboardInterrupt()])
@pytest.mark.parametrize("exact", [Exact.EAGER, Exact.GROUPED])
def test_step__that_fails_within_an_expert_leaves_no_copy_unordered(
    folder, sim, monkeypatch, exact, error
):
    """The copies that follow overwrite slots that its kernels may still read."""
    model, tokens = serve(folder, device="sim", budget="20%", exact=exact), TOKENS.to("sim")
    with model.moecast as handle:
        expected = model(tokens).logits

        def fail(_gate_up):
            raise error

        for layer in 2 * handle.layers:
            model.generate(tokens[:1], max_new_tokens=3, pad_token_id=0)
            with monkeypatch.context() as broken:
                broken.setattr(layer.experts, "_apply_gate", fail)
                # Its traceback keeps what asks for experts: that does not end with the step.
                with pytest.raises((StepMemoryError, KeyboardInterrupt)) as _:
                    model(tokens)
        assert torch.equal(model(tokens).logits, expected)
    assert not sim.races
