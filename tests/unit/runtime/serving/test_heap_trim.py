"""The heap is trimmed at intervals and when the server becomes idle, not at every step."""

from runtime.serving.app import HeapTrimmer


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.trims: list[float] = []

    def trimmer(self) -> HeapTrimmer:
        return HeapTrimmer(
            interval_seconds=30,
            trim=lambda: self.trims.append(self.now),
            clock=lambda: self.now,
        )


def test_trimmer__trims_at_most_once_an_interval() -> None:
    clock = Clock()
    trimmer = clock.trimmer()
    for second in range(100):
        clock.now = float(second)
        trimmer.on_step(0.1, [])
    assert clock.trims == [30.0, 60.0, 90.0]


def test_trimmer__trims_whenever_the_server_is_idle() -> None:
    clock = Clock()
    trimmer = clock.trimmer()
    for second in (29.0, 30.5, 31.0):
        clock.now = second
        trimmer.on_step(0.1, [])
        trimmer.on_idle()
    assert clock.trims == [29.0, 30.5, 31.0]
