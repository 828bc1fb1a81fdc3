"""A group that is drawn from for a second key; dictionaries whose keys are their owner's."""

import pytest

from configs.compose import compose_defaults, compose_typed
from predictors.errors import ConfigError
from train.config import TrainConfig


def test_second_group__has_its_own_choice_and_options() -> None:
    config, _ = compose_typed(
        TrainConfig, ["shifted=text", "shifted.path=some folder", "data=pysource"]
    )
    assert (config.data.name, config.shifted.name) == ("pysource", "text")
    assert (config.data.path, config.shifted.path) == (None, "some folder")
    config, _ = compose_typed(TrainConfig, ["other_hardware=rtx4090-pcie4"])
    assert config.other_hardware == config.hardware


def test_second_group__lists_the_same_choices() -> None:
    shifted = compose_defaults(TrainConfig)["shifted"]
    assert (shifted["name"], shifted["num_prompts"]) == ("pysource", 64)


def test_second_group__refuses_an_unknown_choice() -> None:
    with pytest.raises(ConfigError, match="unknown shifted 'pysauce'.*'pysource'"):
        compose_typed(TrainConfig, ["shifted=pysauce"])


@pytest.mark.parametrize(
    "argument", ["predictor.options={capacity: 7}", "predictor.options.capacity=7"]
)
def test_dictionary__takes_any_key_without_a_plus(argument: str) -> None:
    config, _ = compose_typed(TrainConfig, ["predictor=eam-request", argument])
    assert config.predictor.options == {"capacity": 7}
