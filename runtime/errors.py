"""What can be wrong with a checkpoint, a budget or a request, as the user sees it."""

from enum import StrEnum

from predictors.errors import MoecastError


class CheckpointError(MoecastError):
    """A model that is not there, is not a Mixture-of-Experts, or whose bytes cannot be trusted."""


class BudgetError(MoecastError):
    """A budget that cannot be read, or that is less than one step needs."""


class Fault(StrEnum):
    """What can go wrong with a transfer, as it is counted."""

    READ = "read"
    """The system refused a read, three times."""
    TRUNCATED = "truncated"
    """The file ends before the expert does."""
    DAMAGED = "damaged"
    """A checksum of a packed store is wrong."""
    HUNG = "hung"
    """Under way for longer than the watchdog allows; the expert was asked for again."""
    DIED = "died"
    """The transfer's thread ended without a word; another took its place."""


class TransferError(MoecastError):
    """Bytes of an expert that did not arrive: short read, I/O error, dead worker."""

    def __init__(self, message: str, *, fault: Fault = Fault.READ):
        super().__init__(message)
        self.fault = fault


class StoreError(MoecastError):
    """A packed store that is damaged, was made for another model, or cannot be written."""


class ChatError(MoecastError):
    """Messages that the model's chat template cannot write down."""


class GroupError(MoecastError):
    """Generations that cannot go through a model together."""


class PromptFileError(MoecastError):
    """A prompt of a batch is invalid; the message names the line."""


class ResultFileError(MoecastError):
    """The results file belongs to another run, is damaged, or cannot be written."""


class PlanError(MoecastError):
    """KV caches or experts of a batch plan do not fit in memory; the message names what would."""
