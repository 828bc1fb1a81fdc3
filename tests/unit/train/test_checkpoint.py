"""Checkpoints: every value comes back, damage is refused."""

import pytest
import torch

from train.checkpoint import from_bytes, to_bytes
from train.errors import TrainCheckpointError

STATE = {
    **{"epoch": 3, "rate": 1e-3, "nothing": None, "flag": True},
    "state_dict": {"weight": torch.arange(6.0).reshape(2, 3), "empty": torch.zeros(0)},
    "optimizer_states": [
        {"state": {0: {"step": torch.tensor(5.0)}, 1: {}}, "betas": (0.9, 0.999), "ids": [0, 1]}
    ],
}


def test_checkpoint__comes_back_value_for_value() -> None:
    data = to_bytes(STATE)
    assert data.startswith(b"moecast-checkpoint 1 "), "no pickle"
    back = from_bytes(data, what="x")
    torch.testing.assert_close(back, STATE, rtol=0, atol=0)
    assert back["optimizer_states"][0]["betas"] == (0.9, 0.999)
    assert list(back["optimizer_states"][0]["state"]) == [0, 1]


@pytest.mark.parametrize("place", [0, 3, 10, 30, 85, 90, 120, 200, -1])
def test_checkpoint__refuses_a_flipped_bit_and_a_torn_file_before_it_parses(place: int) -> None:
    flipped = bytearray(to_bytes(STATE))
    flipped[place] ^= 1
    for data in (bytes(flipped), to_bytes(STATE)[:place]):
        with pytest.raises(TrainCheckpointError, match="torn"):
            from_bytes(data, what="x")
