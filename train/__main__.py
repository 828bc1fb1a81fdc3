"""`python -m train`: from a model's name to its predictors, scored, exported and in zoo entries."""

import sys

from configs.cli import main
from configs.command import Command

COMMANDS = [
    Command(
        name="",
        config="train",
        run="train.commands:train",
        summary=(
            "Collects a trace if there is none, trains the learned predictors of all layers "
            "together, scores them with the baselines, exports ONNX and writes zoo entries."
        ),
    ),
    Command(
        name="reuse",
        config="train",
        run="train.reuse_training:train_reuse",
        summary=(
            "Trains the predictor of reuse eviction and compares its hit rates with those of "
            "every other policy."
        ),
    ),
    Command(
        name="report",
        config="report",
        run="train.report.build:report",
        summary="Makes report.html of a finished run again, from its results and its trace.",
        keeps_run=False,
        records=False,
    ),
]

if __name__ == "__main__":
    sys.exit(main("train", COMMANDS))
