"""What a live run measures: times of steps, stalls, memory."""

import resource
import statistics
import time
from dataclasses import dataclass, field
from typing import Any


def peak_memory_bytes() -> int:
    """The process's largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass
class Stats:
    """Seconds of wall time. A step of several tokens is a prefill, a step of one a decode."""

    stall_seconds: float = 0.0
    """Time in which computation waited for bytes."""
    prefill_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)
    _started: tuple[float, int] | None = None

    def begin_step(self, num_tokens: int) -> None:
        self._started = time.perf_counter(), num_tokens

    def end_step(self) -> None:
        if self._started is None:
            return
        start, num_tokens = self._started
        steps = self.prefill_seconds if num_tokens > 1 else self.decode_seconds
        steps.append(time.perf_counter() - start)
        self._started = None

    def as_dict(self) -> dict[str, Any]:
        """TTFT is the first prefill's time, TPOT the median decode step's; null when not run."""
        return {
            "ttft_seconds": self.prefill_seconds[0] if self.prefill_seconds else None,
            "tpot_seconds": statistics.median(self.decode_seconds) if self.decode_seconds else None,
            "stall_seconds": self.stall_seconds,
            "num_decode_steps": len(self.decode_seconds),
            "peak_memory_bytes": peak_memory_bytes(),
        }
