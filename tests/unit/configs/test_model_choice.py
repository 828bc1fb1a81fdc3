"""A model is a preset, a folder or a repository of the Hub; only the first has preset fields."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from configs.cli import main
from configs.compose import compose_typed
from predictors.errors import ConfigError
from runtime.config import GenerateConfig, ModelConfig
from tests.builders.commands import command_of


def works(config: GenerateConfig) -> None:
    assert config.model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    return tmp_path


def compose_model(*options: str) -> ModelConfig:
    return compose_typed(GenerateConfig, options)[0].model


NAMES = [("./mine", "mine"), ("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B"), ("no/such/folder", "folder")]


@pytest.mark.parametrize("key", ["model", "model.id"])
@pytest.mark.parametrize(("value", "name"), NAMES)
def test_folder_or_hub_id__has_its_own_name_and_dtype(key: str, value: str, name: str) -> None:
    assert compose_model(f"{key}={value}") == ModelConfig(id=value, name=name, dtype="auto")


def test_current_folder__has_its_name(folder: Path) -> None:
    assert compose_model("model=.").name == folder.name


def test_home_folder__is_expanded(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert compose_model("model=~/mine").id == str(folder / "mine")


def test_preset__comes_before_a_folder_of_its_name(folder: Path) -> None:
    (folder / "olmoe").mkdir()
    assert compose_model("model=olmoe").id.startswith("allenai/")


def test_named_preset_with_an_id__keeps_its_fields() -> None:
    model = compose_model("model=qwen2-moe-tiny", "model.id=mine")
    assert (model.name, model.id, model.dtype) == ("qwen2-moe-tiny", "mine", "auto")


def test_options_of_the_model__apply_to_a_folder() -> None:
    model = compose_model("model=mine", "model.dtype=float16", "model.name=ours")
    assert (model.name, model.dtype) == ("ours", "float16")


def test_default_model__is_the_bundled_one_in_its_own_dtype() -> None:
    model = compose_model()
    assert (model.name, model.id, model.dtype) == ("qwen2-moe-tiny", "builtin", "auto")


def test_unknown_word__names_the_closest_preset_and_the_other_forms() -> None:
    closest = r"^unknown model 'qwen2-moe-tini'. Did you mean 'qwen2-moe-tiny'\? "
    with pytest.raises(ConfigError, match=rf"{closest}.*--help.*\./qwen2-moe-tini.*ORG/NAME"):
        compose_model("model=qwen2-moe-tini")


def test_two_models__are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model=mine and model\.id=x: give one"):
        compose_model("model=mine", "model.id=x")


def test_file_of_options__is_no_model(folder: Path) -> None:
    (folder / "run.yaml").write_text("budget: 50%")
    with pytest.raises(ConfigError, match=r"--config run\.yaml"):
        compose_model("model=run.yaml")


def test_positional_model__is_recorded_without_the_preset(folder: Path) -> None:
    positional = ("model", "prompt")
    command = command_of(works, config="runtime.config:GenerateConfig", positional=positional)
    assert main("runtime", [command], ["works", "mine", "A text", "run_dir=r"]) == 0
    record = json.loads((folder / "r/run.json").read_text())
    plain = json.loads(json.dumps(asdict(ModelConfig())))
    assert record["config"]["model"] == plain | {"name": "mine", "id": "mine"}
    assert record["config"]["prompt"] == "A text"
