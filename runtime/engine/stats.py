"""Statistics of a live run: times of steps, memory."""

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from runtime.engine.memory import peak_memory_bytes

KEPT = 1 << 16
"""Steps whose times are kept at least, of each kind: a server that runs for weeks must not grow."""


@dataclass
class StepStats:
    """Seconds of wall time. A prefill is a request's first step, or one of several tokens a row."""

    prefill_seconds: list[float] = field(default_factory=list)
    """Times of the first prefill and the latest ones, at least `KEPT`."""
    decode_seconds: list[float] = field(default_factory=list)
    num_decode_steps: int = 0
    is_prefill: bool = False
    """Whether the last step is a prefill."""
    started: float | None = None
    """When the step began, by `time.perf_counter`; None: none is under way."""

    def begin_step(self, *, is_prefill: bool) -> None:
        self.is_prefill, self.started = is_prefill, time.perf_counter()

    def end_step(self) -> float | None:
        """Return the time of the step that ends now; None when none has begun."""
        if self.started is None:
            return None
        seconds, self.started = time.perf_counter() - self.started, None
        times = self.prefill_seconds if self.is_prefill else self.decode_seconds
        times.append(seconds)
        self.num_decode_steps += not self.is_prefill
        if len(times) > 2 * KEPT:
            del times[1 : KEPT + 1]
        return seconds

    def as_dict(self) -> dict[str, Any]:
        """TTFT is the first prefill's time, TPOT the mean decode step's; null when not run."""
        return {
            "ttft_seconds": self.prefill_seconds[0] if self.prefill_seconds else None,
            "tpot_seconds": statistics.fmean(self.decode_seconds) if self.decode_seconds else None,
            "num_decode_steps": self.num_decode_steps,
            "peak_memory_bytes": peak_memory_bytes(),
        }
