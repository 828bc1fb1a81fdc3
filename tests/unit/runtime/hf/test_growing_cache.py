"""A KV cache with room holds what Transformers' holds, whoever else has seen its tensors."""

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer

from runtime.hf import growing_cache
from runtime.hf.growing_cache import append_in_place, append_token


@pytest.fixture(autouse=True)
def small_room(monkeypatch):
    monkeypatch.setattr(growing_cache, "ROOM", 3)


def draw(num_tokens=1):
    return torch.randn(1, 2, num_tokens, 4)


OPERATIONS = ("append", "append", "append", "prompt", "crop", "copy", "deepcopy", "swap", "reorder")


@torch.no_grad()
@given(st.lists(st.sampled_from(OPERATIONS), max_size=30))
def test_layers__hold_what_those_of_transformers_hold(operations):
    """Two caches, one of which is now and then a copy of the other."""
    append_in_place()
    own, plain = [DynamicLayer(), DynamicLayer()], [[draw(3), draw(3)] for _ in range(2)]
    for layer, states in zip(own, plain, strict=True):
        layer.update(*states)
    for operation in operations:
        layer, states = own[0], plain[0]
        if operation in ("append", "prompt"):
            new = [draw(1 if operation == "append" else 2) for _ in range(2)]
            layer.update(*new)
            plain[0] = [torch.cat(pair, dim=-2) for pair in zip(states, new, strict=True)]
        elif operation == "crop" and layer.get_seq_length() > 1:
            layer.crop(-1)
            plain[0] = [tensor[..., :-1, :] for tensor in states]
        elif operation == "swap":
            own, plain = own[::-1], plain[::-1]
        elif operation == "reorder":
            layer.reorder_cache(torch.tensor([0]))
        elif operation in ("copy", "deepcopy"):
            own[1], plain[1] = getattr(copy, operation)(layer), states
        for layer, states in zip(own, plain, strict=True):
            assert torch.equal(layer.keys, states[0])
            assert torch.equal(layer.values, states[1])


@torch.no_grad()
def test_append_token__copies_only_when_its_room_is_used_up():
    keys, places = draw(5), []
    for _ in range(8):
        keys = append_token(keys, draw())
        places.append(keys.data_ptr())
    assert [len(set(places[i : i + 4])) for i in (0, 4)] == [2, 2]
    assert len(set(places)) == 3
    assert keys.stride()[2:] == (4, 1)


@torch.no_grad()
def test_append_token__a_copy_of_a_tensor_has_no_room():
    keys = append_token(draw(5), draw())
    copied, new = copy.copy(keys), [draw(), draw()]
    both = [append_token(keys, new[0]), append_token(copied, new[1])]
    for tensor, last in zip(both, new, strict=True):
        assert torch.equal(tensor, torch.cat([keys, last], dim=-2))


def test_append_token__made_in_inference_mode_goes_on_outside_of_it():
    with torch.inference_mode():
        keys = append_token(draw(5), draw())
    new = draw()
    assert torch.equal(append_token(keys, new), torch.cat([keys, new], dim=-2))


@pytest.mark.parametrize("shape", [(2, 2, 1, 4), (1, 1, 1, 4), (1, 2, 1, 5)])
def test_append_token__refuses_what_transformers_refuses(shape):
    with pytest.raises(RuntimeError):
        append_token(draw(5), torch.randn(shape))


def test_append_token__of_another_dtype_is_transformers():
    assert append_token(draw(5), draw().double()).dtype is torch.float64


@torch.no_grad()
def test_append_token__leaves_no_memory_to_the_garbage_collector():
    keys, seen = append_token(draw(5), draw()), []
    gc.disable()
    try:
        for _ in range(8):
            seen.append(weakref.ref(keys))
            keys = append_token(keys, draw())
        assert not any(reference() is not None for reference in seen)
    finally:
        gc.enable()
