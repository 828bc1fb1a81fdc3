"""Systems and models by name: the same in Python as on the command line."""

import pytest

from configs.compose import compose_defaults, compose_typed
from predictors.errors import MoecastError
from runtime import presets
from runtime.config import GenerateConfig, ModelConfig, VerifyModelConfig
from runtime.generation.config import ChatConfig
from runtime.serving.config import ServeConfig
from train.config import EvaluateConfig

SYSTEMS = presets.choice_names("system")
PRESETS = [
    *((presets.load_system, GenerateConfig, "system", name) for name in SYSTEMS),
    (presets.load_model_preset, GenerateConfig, "model", "qwen2-moe-tiny"),
    (presets.load_model_preset, GenerateConfig, "model", "olmoe"),
    (presets.load_hardware, EvaluateConfig, "hardware", "rtx3090-disk"),
    (presets.load_shape, EvaluateConfig, "shape", "arctic"),
]


@pytest.mark.parametrize(("load", "schema", "key", "name"), PRESETS)
def test_preset__equals_what_a_command_composes(load, schema, key, name) -> None:
    composed = getattr(compose_typed(schema, [f"{key}={name}"])[0], key)
    assert [load(name)] == (composed if isinstance(composed, list) else [composed])


@pytest.mark.parametrize("schema", [GenerateConfig, ChatConfig, ServeConfig, VerifyModelConfig])
def test_default_system__is_that_of_every_command(schema: type) -> None:
    assert compose_defaults(schema)["system"]["name"] == presets.DEFAULT_SYSTEM


def test_load_system__an_unknown_key_is_an_error(tmp_path, monkeypatch) -> None:
    (tmp_path / "system").mkdir()
    (tmp_path / "system" / "mine.yaml").write_text("name: mine\nprefetsch: false\n")
    monkeypatch.setattr(presets, "FOLDER", tmp_path)
    with pytest.raises(MoecastError, match=r"mine.yaml: .*'prefetsch'. Did you mean"):
        presets.load_system("mine")


def test_find_model__takes_presets_folders_and_hub_ids(tmp_path, monkeypatch) -> None:
    preset = presets.load_model_preset("qwen1.5-moe")
    assert presets.find_model("qwen1.5-moe") == preset
    assert presets.find_model(preset.id) == preset, "the Hub id of a preset"
    assert presets.find_model("org/name-7b") == ModelConfig(name="name-7b", id="org/name-7b")
    (tmp_path / "olmoe").mkdir()
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "olmoe"
    assert presets.find_model(folder) == ModelConfig(name="olmoe", id=str(folder))
    assert presets.find_model("./olmoe") == ModelConfig(name="olmoe", id="./olmoe")
    assert presets.find_model("olmoe").id == "allenai/OLMoE-1B-7B-0924"
    (tmp_path / "mine").mkdir()
    assert presets.find_model("mine") == ModelConfig(name="mine", id="mine")
    assert presets.find_model(".").name == tmp_path.name
