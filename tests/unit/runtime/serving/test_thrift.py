"""Free heap goes back now and then, not at every step."""

from runtime.serving.thrift import Thrift


def test_heap__is_returned_at_most_once_a_period() -> None:
    now, released = [0.0], []
    thrift = Thrift(every_seconds=30, release=lambda: released.append(now[0]), clock=lambda: now[0])
    for second in range(100):
        now[0] = float(second)
        thrift.stepped(0.1, [])
    assert released == [30.0, 60.0, 90.0]
