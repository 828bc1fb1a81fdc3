"""An ordinary model: batches, beams, sampling, streaming, caches, threads, two at once."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from runtime.errors import CheckpointError
from runtime.transfer.thread_ring import rings
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.served import serve, serving
from tests.builders.waiting import wait_for
from zoo.errors import ZooError

TASKS = Path("/proc/self/task")
"""The threads of this process."""
HAS_NAMES = rings is not None
"""Whether threads that read experts have names: those in C have."""
PROMPTS = torch.randint(1, 64, (3, 8), generator=torch.Generator().manual_seed(5))
LEFT_PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8, [0, 1, 1, 1, 1, 1, 1, 1]])
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
WAYS = {
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
    "penalised": {"do_sample": False, "repetition_penalty": 1.3, "min_new_tokens": 5},
}


def generated(model, way):
    torch.manual_seed(7)
    options = {"attention_mask": LEFT_PADDED, "max_new_tokens": 8, "pad_token_id": 0, **WAYS[way]}
    return model.generate(PROMPTS * LEFT_PADDED, **options)


@pytest.mark.parametrize("way", WAYS)
def test_generate__gives_the_tokens_of_plain_transformers(folder, way):
    with serving(folder, budget="25%") as model:
        assert torch.equal(generated(model, way), generated(plain_eager(folder), way))
        assert model.moecast.stats()["misses"] > 0


def test_generate__streams_each_token_as_it_comes(folder):
    pieces: list[list] = []
    streamer = SimpleNamespace(put=lambda ids: pieces.append(ids.tolist()), end=lambda: None)
    expected = plain_eager(folder).generate(PROMPTS[:1], **GREEDY)[0].tolist()
    with serving(folder, budget="25%") as model:
        model.generate(PROMPTS[:1], streamer=streamer, **GREEDY)
    assert pieces == [[expected[:8]], *([token] for token in expected[8:])]


def test_generate__from_several_threads_at_once(folder):
    plain = plain_eager(folder)
    expected = [plain.generate(prompt, **GREEDY) for prompt in PROMPTS.split(1)]
    with serving(folder, budget="25%") as model, ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            found = pool.map(partial(model.generate, **GREEDY), PROMPTS.split(1))
            assert all(map(torch.equal, found, expected))


def test_load__two_models_in_one_process(folder, tmp_path):
    other = tiny_qwen2_moe(tmp_path / "other", num_experts=6, seed=4)
    models = [serve(folder, budget="25%"), serve(other, budget="50%")]
    plains = [plain_eager(folder), plain_eager(other)]
    with models[0].moecast, models[1].moecast, torch.no_grad():
        for _ in range(2):
            for model, plain in zip(models, plains, strict=True):
                assert torch.equal(model(PROMPTS).logits, plain(PROMPTS).logits)


@pytest.mark.usefixtures("real_collections")
@pytest.mark.parametrize("is_closed", [True, False])
def test_load__frees_an_earlier_model_that_nobody_has(folder, is_closed):
    earlier = serve(folder, budget="25%")
    arena = weakref.ref(earlier.moecast.engine.arenas[0])
    if is_closed:
        earlier.moecast.close()
    del earlier
    with serve(folder, budget="25%").moecast:
        assert arena() is None


def watch_readers():
    """Returns what lists the threads that read experts and were started from now on."""
    before = set(TASKS.iterdir())

    def find() -> list[Path]:
        found = []
        for task in set(TASKS.iterdir()) - before:
            with suppress(OSError):  # it has ended
                if "moecast" in (task / "comm").read_text():
                    found.append(task)
        return found

    return find


def test_close__twice_is_one_and_later_use_is_an_error(folder):
    model = serve(folder)
    model(PROMPTS)
    model.close()
    model.close()
    with pytest.raises(CheckpointError, match="was closed; load it again"):
        model(PROMPTS)


def test_close__ends_a_step_of_another_thread_at_its_next_layer(folder):
    model = serve(folder, budget="25%")
    closing = threading.Thread(target=model.close)

    def close(*_: object) -> None:
        if not closing.ident:
            closing.start()
            wait_for(lambda: model.moecast.engine._closed)

    model.model.layers[1].self_attn.register_forward_hook(close)
    with pytest.raises(CheckpointError, match="was closed; load it again"):
        model(PROMPTS)
    closing.join(30)
    assert not closing.is_alive()


@pytest.mark.usefixtures("real_collections")
def test_close__ends_all_else_where_the_predictor_cannot_be_saved(folder, tmp_path):
    own_readers = watch_readers()
    model = serve(folder, trace_events=tmp_path / "trace.json")
    model(PROMPTS)
    assert own_readers() or not HAS_NAMES
    fail = Mock(side_effect=ZooError("another program has taken the folder"))
    model.moecast.engine.driver.close = fail
    with pytest.raises(ZooError, match="taken the folder"):
        model.close()
    assert (tmp_path / "trace.json").is_file()
    assert gc.get_freeze_count() == 0
    wait_for(lambda: not own_readers())


def test_forward__an_exception_in_a_pass_leaves_the_model_usable(folder):
    plain, fail = plain_eager(folder), Mock(side_effect=RuntimeError("in the middle"))
    with serving(folder, budget="25%") as model, torch.no_grad():
        for layer in (0, 2):
            hook = model.model.layers[layer].mlp.experts.register_forward_hook(fail)
            with pytest.raises(RuntimeError, match="in the middle"):
                model(PROMPTS)
            hook.remove()
            assert torch.equal(model(PROMPTS).logits, plain(PROMPTS).logits)
        with ThreadPoolExecutor(1) as other:  # the failed pass has not kept its turn
            found = other.submit(lambda: model(PROMPTS).logits).result(240)
        assert torch.equal(found, plain(PROMPTS).logits)
