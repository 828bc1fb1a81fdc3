"""The dispatcher with a crew that does what a test tells it: no process, no clock."""

import random
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collect.errors import LaunchError
from collect.launch.board import Board
from collect.launch.dispatch import Dispatcher
from collect.launch.task import Kind, Message


@given(st.integers(0, 12), st.integers(0, 3), st.lists(st.integers(0, 9), max_size=80))
def test_board__every_unit_is_in_one_place(num_units: int, retries: int, moves: list[int]) -> None:
    units = [f"u{i}" for i in range(num_units)]
    board = Board(units, retries=retries)
    tries: Counter[str] = Counter()
    for move in moves:
        worker = move % 3
        if worker not in board.taken:
            unit = board.take(worker)
            if unit is not None:
                tries[unit] += 1
        elif move < 5:
            board.done(worker, None)
        else:
            board.failed(worker, "error")
        places = [*board.waiting, *board.taken.values(), *board.results, *board.given_up]
        assert sorted(places) == sorted(units)
        assert all(count <= retries + 1 for count in tries.values())
        assert all(tries[unit] == retries + 1 for unit in board.given_up)
        assert board.is_over == (len(board.results) + len(board.given_up) == num_units)


class FakeCrew:
    """Each unit goes as the next word of its script says: done, failed, wrong or dies."""

    def __init__(self, scripts: dict[str, list[str]], *, seed: int = 0, false_starts: int = 0):
        self._scripts = {unit: deque(words) for unit, words in scripts.items()}
        self._random = random.Random(seed)
        self._said: list[tuple[int, Message]] = []
        self._false_starts = false_starts
        self.alive: set[int] = set()
        self.busy: dict[int, str] = {}
        self.finished: list[str] = []
        self.closed = False

    def start(self, worker: int) -> None:
        assert worker not in self.alive, "a living worker is not replaced"
        if self._false_starts:
            self._false_starts -= 1
            self._said.append((worker, Message(Kind.DIED, error="no memory")))
            return
        self.alive.add(worker)
        self._said.append((worker, Message(Kind.READY, value={"started": worker})))

    def give(self, worker: int, unit: str) -> None:
        assert worker in self.alive
        assert worker not in self.busy, "one unit at a time"
        assert unit not in self.busy.values(), "a unit has one worker"
        assert unit not in self.finished, "what is done is not done again"
        self.busy[worker] = unit

    def events(self, timeout_seconds: float) -> list[tuple[int, Message]]:
        if not self._said and self.busy:
            worker = self._random.choice(sorted(self.busy))
            self._said += [(worker, one) for one in self._outcome(worker)]
        said, self._said = self._said, []
        return said

    def _outcome(self, worker: int) -> list[Message]:
        unit = self.busy.pop(worker)
        script = self._scripts[unit]
        word = script.popleft() if script else "done"
        begun = Message(Kind.ADVANCED, unit, amount=2)
        if word == "done":
            self.finished.append(unit)
            return [begun, Message(Kind.DONE, unit, value=f"result of {unit}")]
        if word == "dies":
            self.alive.discard(worker)
            return [begun, Message(Kind.DIED, error="killed by signal 9")]
        return [begun, Message(Kind.FAILED, unit, error=f"{unit}!", is_users=word == "wrong")]

    def close(self) -> None:
        self.closed = True


scripts = st.dictionaries(
    st.sampled_from([f"u{i}" for i in range(8)]),
    st.lists(st.sampled_from(["failed", "dies", "done"]), max_size=5),
    max_size=8,
)


@given(scripts, st.integers(1, 4), st.integers(0, 3), st.integers(0, 99))
def test_dispatcher__whatever_dies_every_unit_is_done_once_or_given_up(
    script: dict[str, list[str]], workers: int, retries: int, seed: int
) -> None:
    crew = FakeCrew(script, seed=seed)
    moved: list[int] = []
    with Dispatcher(crew, workers=workers, retries=retries) as dispatcher:
        assert dispatcher.begin()["started"] in range(workers)
        outcome = dispatcher.run(list(script), advance=moved.append, amounts=[5] * len(script))
    assert crew.closed
    assert sorted(crew.finished) == sorted(outcome.results)
    assert outcome.results == {unit: f"result of {unit}" for unit in crew.finished}
    expected = {
        unit
        for unit, words in script.items()
        if len(words) > retries and "done" not in words[: retries + 1]
    }
    assert set(outcome.given_up) == expected
    # What was reported of attempts that came to nothing is taken back.
    assert sum(moved) == 5 * len(outcome.results)


def test_dispatcher__tells_what_failed_and_that_the_rest_is_done() -> None:
    crew = FakeCrew({"a": ["failed"] * 9, "b": [], "c": []})
    told: list[str] = []
    with Dispatcher(crew, workers=2, retries=1, tell=told.append) as dispatcher:
        dispatcher.begin()
        outcome = dispatcher.run(["a", "b", "c"])
    with pytest.raises(LaunchError, match=r"1 of 3 parts failed, the others are done\. a: a!"):
        outcome.require_all("parts")
    assert told == ["a!; a is to be done again", "a!; a is given up"]


def test_dispatcher__what_only_the_user_can_mend_ends_it_at_once() -> None:
    crew = FakeCrew({"a": ["wrong"], "b": []})
    with Dispatcher(crew, workers=1, retries=9) as dispatcher:
        dispatcher.begin()
        with pytest.raises(LaunchError, match="a!"):
            dispatcher.run(["a", "b"])
    assert crew.closed
    assert crew.finished == []


def test_dispatcher__a_worker_that_cannot_start_is_given_up_and_the_others_go_on() -> None:
    crew = FakeCrew({"a": [], "b": []}, false_starts=3)
    with Dispatcher(crew, workers=2, retries=2) as dispatcher:
        dispatcher.begin()
        assert set(dispatcher.run(["a", "b"]).results) == {"a", "b"}
    crew = FakeCrew({}, false_starts=99)
    with (
        pytest.raises(LaunchError, match=r"no worker is left: no memory"),
        Dispatcher(crew, workers=2, retries=2) as dispatcher,
    ):
        dispatcher.begin()
    assert crew.closed
