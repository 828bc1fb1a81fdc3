"""The spans of a replay."""

from typing import Any


class RecordedSpans:
    """A timeline of computed experts, transfers and stalls, in the order of their ends.

    A span is `(kind, expert or layer, start, end)`.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[Any, ...]] = []

    def transferred(self, link, task, start, end, *, track):
        self.spans.append(("fetch" if task.high else "prefetch", task.expert, start, end))

    def computed(self, expert, start, end):
        self.spans.append(("compute", expert, start, end))

    def stalled(self, layer, start, end):
        self.spans.append(("stall", layer, start, end))
