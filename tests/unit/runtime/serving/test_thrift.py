"""Free heap goes back now and then and when a server has nothing to do, not at every step."""

from types import SimpleNamespace

from runtime.serving.thrift import Thrift


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.released: list[float] = []

    def thrift(self) -> Thrift:
        return Thrift(
            every_seconds=30,
            release=lambda: self.released.append(self.now),
            clock=lambda: self.now,
        )


def choice(started_at: float | None = 0.0) -> SimpleNamespace:
    return SimpleNamespace(started_at=started_at)


def test_heap__is_returned_at_most_once_a_period() -> None:
    clock = Clock()
    thrift = clock.thrift()
    thrift.started(choice())
    for second in range(100):
        clock.now = float(second)
        thrift.stepped(0.1, [])
    assert clock.released == [30.0, 60.0, 90.0]


def test_heap__is_returned_when_the_last_answer_has_ended() -> None:
    clock = Clock()
    thrift = clock.thrift()
    one, other, waiting = choice(), choice(), choice(started_at=None)
    thrift.started(one)
    thrift.started(other)
    clock.now = 10.0
    thrift.ended(one)
    thrift.ended(waiting)
    assert clock.released == []
    clock.now = 11.0
    thrift.ended(other)
    assert clock.released == [11.0]
    clock.now = 11.5  # at once again, by a short request
    thrift.started(one)
    thrift.ended(one)
    assert clock.released == [11.0]
