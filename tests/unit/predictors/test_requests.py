"""Live requests: slots, new ones, ended ones, and that they stay few."""

import numpy as np

from predictors.requests import LiveRequests, grow_rows


def test_live_requests__gives_each_request_one_slot_and_knows_it_again() -> None:
    live = LiveRequests()
    present = live.begin_step(np.array([7, 9, 7, 3]))
    # In the order of ids: 3, 7, 9.
    assert present.request_T.tolist() == [1, 2, 1, 0]
    assert sorted(present.slots_R.tolist()) == [0, 1, 2]
    assert sorted(present.new) == [0, 1, 2]
    again = live.begin_step(np.array([7]))
    assert again.slots_R[0] == present.slots_R[1]
    assert again.new == []


def test_live_requests__end_after_idle_steps() -> None:
    live = LiveRequests(idle_steps=2)
    slot = int(live.begin_step(np.array([1])).slots_R[0])
    live.begin_step(np.array([2]))
    assert live.release_ended() == []
    live.begin_step(np.array([2]))
    assert live.release_ended() == [slot]
    # The id comes back: a new request, in a slot that is free.
    assert live.begin_step(np.array([1])).new == [slot]


def test_live_requests__are_bounded() -> None:
    live = LiveRequests(idle_steps=4)
    for step in range(1_000):
        live.begin_step(np.array([step]))
        live.release_ended()
    assert live.num_slots <= 5


def test_grow_rows__keeps_rows_and_doubles() -> None:
    array = np.ones((4, 3), np.float32)
    assert grow_rows(array, 4) is array
    larger = grow_rows(array, 5)
    assert larger.shape == (8, 3)
    assert larger[:4].all()
    assert not larger[4:].any()
