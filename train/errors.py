"""Errors of training."""

from predictors.errors import MoecastError


class TrainError(MoecastError):
    """A setting, a trace or a run folder cannot be used for training."""


class TrainCheckpointError(TrainError):
    """A checkpoint is torn, altered, or of another run."""


class ParityError(RuntimeError):
    """Internal error: an exported network gives other scores than the trained one."""
