"""Checkpoints: every value comes back, damage is refused."""

import pytest
import torch

from train.checkpoint import from_bytes, to_bytes
from train.errors import TrainCheckpointError

STATE = {
    "epoch": 3,
    "rate": 1e-3,
    "nothing": None,
    "flag": True,
    "state_dict": {"weight": torch.arange(6.0).reshape(2, 3), "empty": torch.zeros(0)},
    "optimizer_states": [
        {"state": {0: {"step": torch.tensor(5.0)}, 1: {}}, "betas": (0.9, 0.999), "ids": [0, 1]}
    ],
}


def test_checkpoint__comes_back_value_for_value() -> None:
    back = from_bytes(to_bytes(STATE), what="x")
    torch.testing.assert_close(back, STATE, rtol=0, atol=0)
    assert back["optimizer_states"][0]["betas"] == (0.9, 0.999)
    assert list(back["optimizer_states"][0]["state"]) == [0, 1]


def test_checkpoint__holds_no_pickle() -> None:
    data = to_bytes(STATE)
    assert b"\x80\x02" not in data[:2]
    assert data.startswith(b"moecast-checkpoint 1 ")


@pytest.mark.parametrize("place", [3, 30, 90, 200, -1])
def test_checkpoint__refuses_a_flipped_bit_before_it_parses(place: int) -> None:
    data = bytearray(to_bytes(STATE))
    data[place] ^= 1
    with pytest.raises(TrainCheckpointError, match="torn"):
        from_bytes(bytes(data), what="x")


@pytest.mark.parametrize("length", [0, 10, 85, 120, -1])
def test_checkpoint__refuses_a_torn_file(length: int) -> None:
    with pytest.raises(TrainCheckpointError, match="torn"):
        from_bytes(to_bytes(STATE)[:length], what="x")
