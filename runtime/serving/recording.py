"""The interface of what records a server's requests, which a program above this package makes."""

from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedModel

from runtime.serving.service import ServiceObserver


@dataclass(frozen=True, kw_only=True)
class RecordingCounts:
    """Counts of one server since its start."""

    is_active: bool = False
    """False where nothing is recorded any more, or by this server at all."""
    num_requests: int = 0
    num_tokens: int = 0
    num_dropped: int = 0
    """Requests of the sample that were not recorded: they came faster than they could be written,
    or the trace had reached its size, or could not be written."""
    num_bytes: int = 0
    """Size of the trace."""


class RequestRecorder(ServiceObserver):
    """Records what the running choices compute. This one records nothing."""

    nothing: ClassVar[RecordingCounts] = RecordingCounts()

    def attach(self, model: PreTrainedModel) -> None:
        """Attaches to the loaded model; called in the engine thread, before any forward pass.

        Raises:
            MoecastError: this model cannot be recorded.
        """

    def counts(self) -> RecordingCounts:
        return self.nothing

    def close(self) -> None:
        """Writes what is complete; called after the engine thread has ended."""
