"""Statistics of a live run: times of steps, memory."""

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from runtime.engine.memory import peak_memory_bytes

KEPT = 1 << 16
"""Steps whose times are kept at least, of each kind: a server that runs for weeks must not grow."""


@dataclass(frozen=True)
class StepTimes:
    """Times of one forward pass, from `time.perf_counter`."""

    start: float
    num_tokens: int
    is_prefill: bool
    end: float


@dataclass
class StepStats:
    """Seconds of wall time. A prefill is a request's first step, or one of several tokens a row."""

    prefill_seconds: list[float] = field(default_factory=list)
    """Times of the first prefill and the latest ones, at least `KEPT`."""
    decode_seconds: list[float] = field(default_factory=list)
    num_decode_steps: int = 0
    _started: tuple[float, int, bool] | None = None

    def begin_step(self, num_tokens: int, *, is_prefill: bool) -> None:
        self._started = time.perf_counter(), num_tokens, is_prefill

    def end_step(self) -> "StepTimes | None":
        """The step that ends now; None when none has begun."""
        if self._started is None:
            return None
        step = StepTimes(*self._started, end=time.perf_counter())
        times = self.prefill_seconds if step.is_prefill else self.decode_seconds
        times.append(step.end - step.start)
        self.num_decode_steps += not step.is_prefill
        if len(times) > 2 * KEPT:
            del times[1 : KEPT + 1]
        self._started = None
        return step

    def as_dict(self) -> dict[str, Any]:
        """TTFT is the first prefill's time, TPOT the mean decode step's; null when not run."""
        return {
            "ttft_seconds": self.prefill_seconds[0] if self.prefill_seconds else None,
            "tpot_seconds": statistics.fmean(self.decode_seconds) if self.decode_seconds else None,
            "num_decode_steps": self.num_decode_steps,
            "peak_memory_bytes": peak_memory_bytes(),
        }
