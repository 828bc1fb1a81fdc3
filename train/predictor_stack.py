"""Interface of networks that are trained together and exported.

Shape suffixes: L layers, F figures, B batch, E experts.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from predictors.base import Floats, Predictor, Signal
from predictors.spec import ModelSpec
from train.data import Batch, InputSpec


class ReferenceScores(NamedTuple):
    """Torch's scores of one batch, to compare with the exported predictor."""

    kind: str
    signal: Signal
    """The event at which the predictor answers."""
    source: int
    """The layer of that event."""
    target: int
    scores_BE: Floats


class PredictorStack(nn.Module):
    """Networks of all layers as stacked products, with one figure for each forecast."""

    labels: list[str]
    """Labels of the figures: `mlp/layer_03`, `residual/horizon_2/layer_05`."""
    needs: InputSpec
    lr_share: float = 1.0
    """Its learning rate, as a share of the run's."""

    def normalise_by(self, batch: Batch) -> None:
        """Fixes the input normalisation to this sample; before training only."""
        raise NotImplementedError

    def losses(self, batch: Batch) -> Tensor:
        """`[F]`. Networks share no weights, so their sum trains each as if it were alone."""
        raise NotImplementedError

    def hits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """`[F]` each: a sum and a count whose ratio is the accuracy of each figure."""
        raise NotImplementedError

    def calibrate(self, batches: Iterable[Batch]) -> None:
        """Fits what turns scores into probabilities, on requests that were not trained on."""

    def export(self, spec: ModelSpec) -> Mapping[str, Predictor]:
        """The run-time predictors, by kind."""
        raise NotImplementedError

    def answers(self, batch: Batch) -> Iterator[ReferenceScores]:
        """Scores of the batch's tokens as torch computes them."""
        raise NotImplementedError
