"""Options that take lists: of words, of numbers, of a group's choices."""

import pytest

from configs.compose import compose_typed
from predictors.errors import ConfigError
from runtime.config import GenerateConfig
from runtime.presets import choice_names
from runtime.tools.bench.config import BenchConfig


def test_list__takes_words_and_numbers_with_commas_between_them() -> None:
    config, _ = compose_typed(BenchConfig, ["budget=10%, 512MiB", "batch_size=1,8"])
    assert config.budget == ["10%", "512MiB"]
    assert config.batch_size == [1, 8]
    config, _ = compose_typed(BenchConfig, ["budget=[5%,6%]", "batch_size=[2]"])
    assert (config.budget, config.batch_size) == (["5%", "6%"], [2])


def test_choices__are_composed_in_the_given_order() -> None:
    config, tree = compose_typed(BenchConfig, ["system=promoe,on-demand,promoe"])
    for system, name in zip(config.system, ("promoe", "on-demand"), strict=True):
        assert system == compose_typed(GenerateConfig, [f"system={name}"])[0].system
    assert [one["name"] for one in tree["system"]] == ["promoe", "on-demand"]


def test_several__all_leaves_out_variants_of_others() -> None:
    config, _ = compose_typed(BenchConfig, ["system=all"])
    names = choice_names("system")
    variants = [name for name in names if name.endswith(("-one-by-one", "-at-once"))]
    assert len(variants) == 4
    assert [one.name for one in config.system] == [name for name in names if name not in variants]
    assert compose_typed(BenchConfig, [])[0] == config


def test_several__refuse_unknown_choices() -> None:
    with pytest.raises(ConfigError, match="unknown system 'promo'. Did you mean 'promoe'.*"):
        compose_typed(BenchConfig, ["system=lfu,promo"])
    with pytest.raises(ConfigError, match="unknown option 'system.name'"):
        compose_typed(BenchConfig, ["system.name=x"])
