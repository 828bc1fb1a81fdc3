"""What can be wrong with a file of prompts, its results, or a plan, as the user sees it."""

from predictors.errors import MoecastError


class InputError(MoecastError):
    """A line of the input that is no prompt for this model; the message names the line."""


class OutputError(MoecastError):
    """Results that are there already and are not of this run, or that cannot be written."""


class PlanError(MoecastError):
    """A plan that memory does not hold; the message names what it would hold."""
