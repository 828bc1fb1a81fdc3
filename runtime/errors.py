"""Errors of the runtime that users see."""

from enum import StrEnum

from predictors.errors import MoecastError


class CheckpointError(MoecastError):
    """A model is missing, damaged, or not a Mixture-of-Experts model."""


class BudgetError(MoecastError):
    """A budget is malformed, or too small for one step."""


class StepMemoryError(MoecastError):
    """A forward pass takes more memory than is free; the message names a budget that leaves it."""


class Fault(StrEnum):
    """Kinds of transfer failures, as they are counted."""

    READ = "read"
    """Three attempts to read failed."""
    TRUNCATED = "truncated"
    """The file is shorter than the index says."""
    DAMAGED = "damaged"
    """A checksum of a packed store does not match."""
    HUNG = "hung"
    """The transfer exceeded the watchdog's limit; the expert was requested again."""
    DIED = "died"
    """The transfer thread died; another replaced it."""


class TransferError(MoecastError):
    """Bytes of an expert did not arrive: short read, I/O error, dead thread."""

    def __init__(self, message: str, *, fault: Fault = Fault.READ):
        super().__init__(message)
        self.fault = fault


class RoutingLogError(MoecastError):
    """A routing log is missing, damaged, or does not fit the model; the message names the line."""


class StoreError(MoecastError):
    """A packed store is damaged, was made for another model, or cannot be written."""


class ChatError(MoecastError):
    """The model's chat template cannot render the messages."""


class GrammarError(MoecastError):
    """A grammar cannot constrain an answer.

    Args:
        field: the field of the request that gives it.
    """

    def __init__(self, message: str, *, field: str | None = None):
        super().__init__(message)
        self.field = field


class GroupError(MoecastError):
    """Sequences cannot be generated together."""


class PromptFileError(MoecastError):
    """A prompt of a batch is invalid; the message names the line."""


class ResultFileError(MoecastError):
    """The results file belongs to another run, is damaged, or cannot be written."""


class PlanError(MoecastError):
    """KV caches or experts of a batch plan do not fit in memory; the message names what would."""
