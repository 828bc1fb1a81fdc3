"""`load`: forms of its arguments, and errors that name the allowed ones."""

import inspect

import pytest
import torch

import runtime
from predictors.errors import MoecastError
from runtime.config import ModelConfig
from runtime.generation.loading import configure_model
from tests.builders.models import tiny_qwen2_moe


def test_configure_model__keeps_what_is_not_given() -> None:
    assert configure_model("qwen2-moe-tiny") == ModelConfig(dtype="auto")
    assert configure_model("qwen2-moe-tiny", dtype="float32").dtype == "float32"
    given = ModelConfig(name="mine", id="org/mine", revision="abc", local_only=False)
    assert configure_model(given) is not given
    assert configure_model(given) == given
    changed = configure_model("qwen1.5-moe", local_only=False, revision="r", dtype=torch.bfloat16)
    assert (changed.name, changed.local_only, changed.revision) == ("qwen1.5-moe", False, "r")
    assert changed.dtype == "bfloat16"


WRONG_VALUES = [
    ({"model": 5}, r"model=5: give the name of a preset, a folder or a Hub id"),
    ({"model": "nothing-like-it"}, r"Choices: .*olmoe.*a folder"),
    ({"model": "qwen15-moe"}, r"Did you mean 'qwen1.5-moe'\?.*\./qwen15-moe.*ORG/NAME"),
    ({"dtype": "bf16"}, r"dtype=bf16: allowed are auto, float32, bfloat16, float16"),
    ({"decode_kernels": "fast"}, r"decode_kernels=fast: allowed are auto, library, own"),
    ({"decode_threads": 0}, r"decode_threads=0: must be at least 1"),
    ({"dtype": torch.float64}, r"dtype=float64: allowed are auto, float32"),
    ({"system": "moecst"}, r"'moecst'. Did you mean 'moecast'\?$"),
    ({"system": 3}, r"system=3: give a name such as 'moecast', or a SystemConfig"),
    ({"budget": 1.5}, r"budget=1.5: a share .* at most 1 or 100%; or write .*4GiB"),
    ({"budget": "lots"}, r"budget='lots': write a size .*TiB.*50%.*0\.5.*auto"),
    ({"host_budget": "auto"}, r"host_budget='auto': write a size"),
    ({"device": "gpu"}, r"device=gpu: write auto, cpu, cuda"),
    ({"model": "qwen1.5-moe"}, r"is not on this machine.*Python local_only=False"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_VALUES)
def test_load__wrong_values_name_the_allowed_ones(arguments, message) -> None:
    with pytest.raises(MoecastError, match=message):
        runtime.load(**arguments)


def test_load__describes_all_of_its_arguments() -> None:
    text = inspect.getdoc(runtime.load)
    sections = [f"{name}:" for name in ("Args", "Returns", "Raises", "Example")]
    assert [line for line in text.splitlines() if line in sections] == sections
    for name in inspect.signature(runtime.load).parameters:
        assert f"    {name}: " in text


@pytest.mark.parametrize("budget", [0.5, "50%", ".5"])
def test_load__takes_shares_of_all_experts_and_paths_as_text(tmp_path, budget) -> None:
    folder, events = str(tiny_qwen2_moe(tmp_path / "model")), str(tmp_path / "events.json")
    model = runtime.load(folder, budget=budget, system="on-demand", trace_events=events)
    with model.moecast as handle:
        assert handle.stats()["arena_slots"] == 8
    assert (tmp_path / "events.json").is_file()


def test_load__default_is_moecast_with_its_trained_predictors() -> None:
    with runtime.load(budget=0.25).moecast as handle:
        driver = handle.engine.driver
        assert (driver.predictor_kind, driver.reuse_predictor_kind) == ("residual", "reuse")
