"""What can be wrong with an entry, as the user sees it."""

from predictors.errors import MoecastError


class ZooError(MoecastError):
    """An entry that is not there, not complete, or not allowed."""


class DamagedError(ZooError):
    """Bytes that are not those that the digest promises: torn, altered or from elsewhere."""


class MismatchError(ZooError):
    """An entry that was made for another model, revision, shape, top_k or dtype."""


class RefusedError(ZooError):
    """An entry that may not be published yet: no card, licence, held-out metrics or trace."""


class StorageError(ZooError):
    """An address that cannot be opened or written to."""


class UnreachableError(StorageError):
    """A storage that does not answer, or answers with an error."""


class StaleError(ZooError):
    """An index that is older than one seen before, or past its date."""


class SignatureError(ZooError):
    """An entry without a signature, with one by another key, or changed since it was signed."""
