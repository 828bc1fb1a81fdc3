"""What can be wrong with a checkpoint, a budget or a request, as the user sees it."""

from predictors.errors import MoecastError


class CheckpointError(MoecastError):
    """A model that is not there, is not a Mixture-of-Experts, or whose bytes cannot be trusted."""


class BudgetError(MoecastError):
    """A budget that cannot be read, or that is less than one step needs."""


class TransferError(MoecastError):
    """Bytes of an expert that did not arrive: short read, I/O error, dead worker."""


class StoreError(MoecastError):
    """A packed store that is damaged, was made for another model, or cannot be written."""


class ChatError(MoecastError):
    """Messages that the model's chat template cannot write down."""
