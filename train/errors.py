"""Errors of training."""

from predictors.errors import MoecastError


class TrainError(MoecastError):
    """A setting, a trace or a run folder that training cannot use."""


class TrainCheckpointError(TrainError):
    """A checkpoint that is torn, altered, or of another run."""


class ParityError(RuntimeError):
    """Internal error: an exported network gives other scores than the trained one."""
