"""Free heap goes back now and then and when a server has nothing to do, not at every step."""

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


def test_heap__is_returned_at_most_once_a_period() -> None:
    clock = Clock()
    thrift = clock.thrift()
    for second in range(100):
        clock.now = float(second)
        thrift.stepped(0.1, [])
    assert clock.released == [30.0, 60.0, 90.0]


def test_heap__is_returned_whenever_the_server_rests() -> None:
    clock = Clock()
    thrift = clock.thrift()
    for second in (29.0, 30.5, 31.0):
        clock.now = second
        thrift.stepped(0.1, [])
        thrift.rested()
    assert clock.released == [29.0, 30.5, 31.0]
