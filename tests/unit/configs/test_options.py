"""`--config FILE`: a YAML file of options, which those of the command line override."""

import json
from pathlib import Path

import pytest

from configs.cli import main
from configs.compose import compose_typed
from predictors.errors import ConfigError
from runtime.config import GenerateConfig
from runtime.tools.bench.config import BenchConfig
from tests.unit.configs.test_cli import COMMANDS


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "options.yaml"


def compose_generate(file: Path, *options: str) -> GenerateConfig:
    return compose_typed(GenerateConfig, options, [file])[0]


def test_file__has_nested_and_dotted_keys_and_choices(file: Path) -> None:
    file.write_text(
        "system: moecast\nsystem.cancel: true\nmodel:\n  dtype: bfloat16\nbudget: 0.5\n"
        "max-new-tokens: 3\nprompt: 'a, {b} ${c}'\ndevices: [cpu, 'cuda:1']\nstore:\n"
        "  page_cache: keep\n  path: a/b\npredictor: null\n"
    )
    config = compose_generate(file)
    assert (config.system.name, config.system.cancel) == ("moecast", True)
    assert (config.model.name, config.model.dtype) == ("qwen2-moe-tiny", "bfloat16")
    assert (config.budget, config.max_new_tokens) == ("0.5", 3)
    assert (config.prompt, config.devices) == ("a, {b} ${c}", ["cpu", "cuda:1"])
    assert (config.store.page_cache, config.store.path) == ("keep", Path("a/b"))


def test_command_line__overrides_the_file(file: Path) -> None:
    file.write_text("system: moecast\nbudget: 10%\nseed: 3\nmodel: olmoe\n")
    config = compose_generate(file, "system=lfu", "budget=20%", "model=qwen1.5-moe")
    assert (config.system.name, config.budget, config.seed) == ("lfu", "20%", 3)
    assert config.model.name == "qwen1.5-moe"


def test_model_of_the_command_line__replaces_that_of_the_file(file: Path) -> None:
    file.write_text("model: {id: a/b, name: c, revision: d, local_only: false}\n")
    model = compose_generate(file, "model=e/f").model
    assert (model.id, model.name, model.revision, model.local_only) == ("e/f", "f", None, False)
    assert compose_generate(file).model.name == "c"


def test_several_choices_and_lists__are_lists_or_text(file: Path) -> None:
    file.write_text("system: [promoe, lfu]\nbudget: 5%,6%\nbatch_size: 4\n")
    config, _ = compose_typed(BenchConfig, [], [file])
    assert [system.name for system in config.system] == ["promoe", "lfu"]
    assert (config.budget, config.batch_size) == (["5%", "6%"], [4])


def test_missing_file__is_an_error(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*options\.yaml: No such file"):
        compose_generate(file)


def test_file__is_recorded(file: Path, tmp_path: Path) -> None:
    file.write_text("zoo: a\n")
    assert main("zoo", COMMANDS, ["works", "--config", str(file), f"run_dir={tmp_path / 'r'}"]) == 0
    record = json.loads((tmp_path / "r/run.json").read_text())
    assert (record["config_files"], record["config"]["zoo"]) == ([str(file)], "a")
