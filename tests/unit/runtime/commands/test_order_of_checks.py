"""What JSON files and options can refuse is refused before any weights are read."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from predictors.errors import MoecastError
from runtime.commands import chat, generate
from runtime.config import BUILTIN_MODELS, GenerateConfig, ModelConfig, StoreConfig
from runtime.engine import loading
from runtime.generation.config import ChatConfig
from runtime.serving import served_model
from runtime.serving.config import ServeConfig
from tests.builders.models import set_fields


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """Return a model whose weights nothing may read."""
    read = Mock(side_effect=AssertionError("weights are read"))
    monkeypatch.setattr(loading, "load_configured", read)
    shutil.copytree(BUILTIN_MODELS / "qwen2_moe_tiny", tmp_path / "model")
    return ModelConfig(name="model", id=str(tmp_path / "model"))


GENERATE = generate.run, GenerateConfig(prompt="a")
COMMANDS = [GENERATE, (chat.run, ChatConfig()), (served_model.load_model, ServeConfig())]


@pytest.fixture(params=COMMANDS, ids=["generate", "chat", "serve"])
def start(request: pytest.FixtureRequest, model: ModelConfig) -> Any:
    """Each command, with more options."""
    run, config = request.param
    return lambda **more: run(replace(config, model=model, **more))


def test_tokenizer__is_loaded_before_the_weights(start, model: ModelConfig) -> None:
    Path(model.id, "tokenizer.json").write_text("{")
    with pytest.raises(MoecastError, match="its tokenizer cannot be read"):
        start()


def test_model__that_generates_nothing_is_refused_before_the_weights(start, model) -> None:
    kind = {"architectures": ["OpenAIPrivacyFilterForTokenClassification"]}
    set_fields(Path(model.id), model_type="openai_privacy_filter", **kind)
    with pytest.raises(MoecastError, match="OpenAIPrivacyFilter.* generates nothing"):
        start()


def test_packed_store__is_opened_before_the_weights(start, tmp_path: Path) -> None:
    with pytest.raises(MoecastError, match="a packed store is a folder that moecast pack made"):
        start(store=StoreConfig(path=tmp_path / "none"))


def test_predictor__is_looked_for_before_the_weights_are_read(start) -> None:
    with pytest.raises(MoecastError, match="unknown zoo entry 'nowhere/mlp'"):
        start(predictor="nowhere/mlp")


@pytest.mark.parametrize("start", COMMANDS[1:], ids=["chat", "serve"], indirect=True)
def test_chat_template__is_read_before_the_weights(start, tmp_path: Path) -> None:
    with pytest.raises(MoecastError, match=r"chat_template=\S+ is not usable"):
        start(chat_template=tmp_path / "none")


def test_prompt__is_measured_before_the_weights_are_read(model: ModelConfig) -> None:
    with pytest.raises(MoecastError, match="exceed the model's context of"):
        generate.run(GenerateConfig(model=model, prompt="a", max_new_tokens=1 << 20))
