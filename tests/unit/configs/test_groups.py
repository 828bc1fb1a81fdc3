"""Options that are chosen by name, and options that take lists and dictionaries."""

from pathlib import Path

import pytest

from collect.config import CollectConfig
from configs.compose import compose_typed
from predictors.errors import ConfigError
from runtime.config import GenerateConfig
from runtime.presets import choice_names
from runtime.tools.bench.config import BenchConfig
from train.config import TrainConfig

WRONG_CHOICES = [
    (TrainConfig, "shifted=my.jsonl", "write shifted=jsonl shifted.path=my.jsonl"),
    (CollectConfig, "data=notes.txt", "write data=text data.path=notes.txt"),
    (CollectConfig, "data=texts", "write data=text data.path=texts"),
    (CollectConfig, "data=ORG/NAME", "write data=hub data.path=ORG/NAME"),
    (TrainConfig, "predictor=runs/r/entries/mlp", "a kind to train.*generate predictor=runs/r"),
    (GenerateConfig, "system=mine.yaml", "--config mine.yaml"),
    (BenchConfig, "system=lfu,mine.yaml", "--config mine.yaml"),
    (TrainConfig, "launcher=a/b", "launcher takes one of local, ray, slurm"),
    (TrainConfig, "shifted=pysauce", "unknown shifted 'pysauce'.*'pysource'"),
    (BenchConfig, "system=lfu,promo", "unknown system 'promo'. Did you mean 'promoe'.*"),
    (BenchConfig, "system.name=x", "unknown option 'system.name'"),
]


@pytest.mark.parametrize(("schema", "option", "message"), WRONG_CHOICES)
def test_wrong_choice__says_what_to_write(schema, option, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    with pytest.raises(ConfigError, match=message):
        compose_typed(schema, [option])


def test_second_group__has_its_own_choice_and_options() -> None:
    given = ["shifted=text", "shifted.path=some folder", "data=pysource"]
    config, _ = compose_typed(TrainConfig, given)
    assert (config.data.name, config.shifted.name) == ("pysource", "text")
    assert (config.data.path, config.shifted.path) == (None, "some folder")
    config, _ = compose_typed(TrainConfig, ["other_hardware=rtx4090-pcie4"])
    assert config.other_hardware == config.hardware


DICTIONARIES = [
    *("predictor.options={capacity: 7}", "predictor.options={capacity:7}"),
    "predictor.options.capacity=7",
]


@pytest.mark.parametrize("argument", DICTIONARIES)
def test_dictionary__takes_any_key_without_a_plus(argument: str) -> None:
    config, _ = compose_typed(TrainConfig, ["predictor=eam-request", argument])
    assert config.predictor.options == {"capacity": 7}


def test_list__takes_words_and_numbers_with_commas_between_them() -> None:
    config, _ = compose_typed(BenchConfig, ["budget=10%, 512MiB", "batch_size=1,8"])
    assert (config.budget, config.batch_size) == (["10%", "512MiB"], [1, 8])
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
