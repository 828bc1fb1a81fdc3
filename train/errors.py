"""What can go wrong in training, told apart from what goes wrong elsewhere."""

from predictors.errors import MoecastError


class TrainError(MoecastError):
    """A setting, a trace or a run folder that training cannot use."""


class TrainCheckpointError(TrainError):
    """A checkpoint that is torn, altered, or of another run."""


class ParityError(RuntimeError):
    """An exported network that does not answer as the trained one does: ours to mend."""
