"""The interface through which an engine and its transfer workers report spans of time."""

from typing import Protocol

from runtime.policy.eviction.protocol import Expert
from runtime.policy.tier import TransferTask


class TimelineSink(Protocol):
    """Receives spans of a run; times are those of `time.perf_counter`, in seconds."""

    def transferred(
        self, link: str, task: TransferTask, start: float, end: float, *, track: str
    ) -> None: ...

    def computed(self, expert: Expert, start: float, end: float) -> None: ...

    def stalled(self, layer: int, start: float, end: float) -> None: ...

    def computed_dense(self, layer: int, start: float, end: float) -> None: ...

    def predicted(self, event: str, layer: int, start: float, end: float) -> None: ...

    def step(self, num_tokens: int, start: float, end: float) -> None: ...

    def close(self) -> None: ...
