"""Files and options of an entry that do not belong together are errors of the predictor."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from predictors.errors import MoecastError
from predictors.registry import KINDS, load_from_files
from predictors.stored import WEIGHTS
from tests.builders.predictors import serve, small_spec

SPEC = small_spec()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("skip", {"horizon": [1]}, "skip: horizon=[1]: must be a valid integer"),
        ("skip", {"horizon": True}, "skip: horizon=True: must be a number"),
        ("skip", {"horizon": 2**64}, "skip: horizon=18446744073709551616: must fit in 64 bits"),
        ("skip", {"horizon": 0.5}, "skip: horizon=0.5: must be a valid integer"),
        ("popularity", {"ahead": {}}, "popularity: ahead={}: must be a valid integer"),
        ("correlation", {"least": float("nan")}, "least=nan: must be a finite number"),
        ("eam-sequence", {"rebuild_after": 0}, "rebuild_after=0: at least 1"),
        ("eam-sequence", {"seed": -1}, "no eam-sequence predictor can be made of these files and"),
        ("eam-sequence", {"capacity": 2**40}, "Unable to allocate"),
        ("residual", {"decays": [0.5]}, "no residual predictor can be made"),
    ],
)
def test_load__names_the_option(kind: str, options: Mapping[str, Any], message: str) -> None:
    files = {} if kind == "residual" else KINDS[kind].empty(SPEC).files()
    with pytest.raises(MoecastError) as error:
        load_from_files(kind, SPEC, files=files, options=options)
    assert message in str(error.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_load__refuses_numbers_that_are_not_finite(value: float) -> None:
    files = KINDS["popularity"].empty(SPEC).files()
    arrays = {name: np.full_like(array, value) for name, array in load(files[WEIGHTS]).items()}
    with pytest.raises(MoecastError, match="shares of the popularity predictor has infinities"):
        load_from_files("popularity", SPEC, files={WEIGHTS: save(arrays)}, options={})


def test_popularity__further_ahead_than_there_are_layers_forecasts_all_at_once() -> None:
    files = KINDS["popularity"].empty(SPEC).files()
    predictor = load_from_files("popularity", SPEC, files=files, options={"ahead": 2**31})
    answers = serve(predictor, np.zeros((SPEC.num_layers, 1, 1), np.int64))
    assert [*answers[-1]] == [*range(SPEC.num_layers)]
    assert not any(answers[layer] for layer in range(SPEC.num_layers))
