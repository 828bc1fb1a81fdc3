"""What can be wrong with a trace, with prompts, or with a recording."""

from predictors.errors import MoecastError


class TraceError(MoecastError):
    """A trace that is not there, not finished, not whole, or of another model."""


class PromptError(MoecastError):
    """Prompts that cannot be had: unknown name, unreadable file, Hub out of reach."""


class DiskSpaceError(MoecastError):
    """The disk has not got the bytes that a trace needs."""


class LaunchError(MoecastError):
    """Workers that can not be had, or units that they could not do."""
