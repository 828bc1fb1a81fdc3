"""Errors of traces, prompts and recordings."""

from predictors.errors import MoecastError


class TraceError(MoecastError):
    """A trace that is missing, incomplete, damaged, or of another model."""


class PromptError(MoecastError):
    """Prompts that cannot be read: unknown name, unreadable file, Hub out of reach."""


class LaunchError(MoecastError):
    """Workers that cannot be started, or units that failed."""


class ClusterLostError(LaunchError):
    """The head of a Ray cluster is lost, and what it ran."""

    # Ray's threads are still connected to it, and crash at times when Python ends.
    ends_process = True
