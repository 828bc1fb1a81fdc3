"""Faults of entries and storages that the user can correct."""

from predictors.errors import MoecastError


class ZooError(MoecastError):
    """An entry that is missing, incomplete or not allowed."""


class DamagedError(ZooError):
    """Bytes that do not have the expected digest: torn, altered, or of something else."""


class MismatchError(ZooError):
    """An entry that was made for another model, revision, shape, top_k or dtype."""


class RefusedError(ZooError):
    """An entry that cannot be published: card, licence, held-out metrics or trace are missing."""


class StorageError(ZooError):
    """An address that cannot be opened or written to."""


class UnreachableError(StorageError):
    """A storage that does not answer, or answers with an error."""


class ConflictError(StorageError):
    """A file that another publisher replaced between a read and a write, or during a read."""


class SignatureError(ZooError):
    """An entry that is not signed, is signed with another key, or has changed since."""
