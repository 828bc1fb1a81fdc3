"""Texts of the user are taken as they stand, wherever they are given."""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from configs.cli import main
from configs.compose import compose_typed
from predictors.errors import ConfigError, MoecastError
from runtime.config import GenerateConfig, VerifyModelConfig
from train.config import TrainConfig

HARD = [
    *("hello ${oc.env:SECRET}", "\\${oc.env:SECRET}", "\\\\${oc.env:SECRET} \\", '"quoted"'),
    *("'", "???", "${", "${${oc.env:SECRET}}", "[a, b", "null, or not", " spaced ", "a=b=c"),
    *("50%", "line\nline\ttab", "\u2028 \U0001f600 e\u0301"),
]

BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghi")
)
"""Nine to the power of nine values."""


@pytest.mark.parametrize("text", HARD)
def test_text__is_taken_verbatim(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SECRET", "resolved")
    file = tmp_path / "options.yaml"
    file.write_text(yaml.safe_dump({"prompt": text, "store": {"path": text}}))
    for arguments, files in (([f"prompt={text}", f"store.path={text}"], []), ([], [file])):
        config, tree = compose_typed(GenerateConfig, arguments, files)
        assert (config.prompt, config.store.path) == (text, Path(text))
        assert (tree["prompt"], tree["store"]["path"]) == (text, Path(text))


def test_texts_in_lists_and_dictionaries__are_not_resolved(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SECRET", "resolved")
    hard = "\\\\${oc.env:SECRET}"
    config, tree = compose_typed(VerifyModelConfig, [f"prompts={hard},???,'a'"])
    assert config.prompts == tree["prompts"] == [hard, "???", "'a'"]
    file = tmp_path / "options.yaml"
    options = {"a": hard, "b": [{"c": hard}]}
    file.write_text(yaml.safe_dump({"prompts": [hard], "seed": 3}))
    assert compose_typed(VerifyModelConfig, [], [file])[0].prompts == [hard]
    file.write_text(yaml.safe_dump({"predictor": "eam-request", "predictor.options": options}))
    config, tree = compose_typed(TrainConfig, [], [file])
    assert config.predictor.options == tree["predictor"]["options"] == options
    with pytest.raises(ConfigError, match=r"^seed=\$\{oc.env:SECRET\}: must be"):
        compose_typed(VerifyModelConfig, ["seed=${oc.env:SECRET}"])


def test_later_options__replace_texts() -> None:
    config, tree = compose_typed(GenerateConfig, ["predictor=stride", "predictor=null"])
    assert (config.predictor, tree["predictor"]) == (None, None)
    assert compose_typed(GenerateConfig, ["prompt=1", "prompt=1e5"])[0].prompt == "1e5"
    given = ["store.path=a", "store={path: b, page_cache: keep}"]
    config, tree = compose_typed(GenerateConfig, given)
    assert (config.store.path, tree["store"]["path"]) == (Path("b"), Path("b"))


REFUSED_VALUES = [
    ("seed=x", "seed=x: must be a valid integer"),
    ("seed=1,2", "seed=1,2: must be a valid integer.*; several values need -m"),
    ("verify=maybe", "verify=maybe: must be a valid boolean"),
    ("temperature=high", "temperature=high: must be a valid number"),
    ("prompt=a\udcff", "prompt: the text is not valid UTF-8"),
    ("prompt=a\0b", "prompt: the text has a null character"),
    ("temperature=nan", "temperature=nan: must be a finite number"),
    ("temperature=1e999", "temperature=inf: must be a finite number"),
    ("seed=18446744073709551616", "seed=18446744073709551616: must fit in 64 bits"),
    ("seed=4294967296", "seed=4294967296: must be from 0 to 4294967295"),
    ("seed=-1", "seed=-1: must be from 0 to 4294967295"),
    (f"max_new_tokens=1{'0' * 40}", "max_new_tokens=1.*: must fit in 64 bits"),
    (f"system={{name: {'[' * 500}{']' * 500}}}", "unknown system"),
    (f"model={'a' * 5000}", "unknown model"),
    ("model=~nosuchuser/a", "~nosuchuser has no home folder"),
    ("store.path=~nosuchuser/store", "~nosuchuser has no home folder"),
    ("seed=[1", r"seed=\[1: must be a valid integer"),
    ("devices=[1", r"devices=\[1: not YAML"),
    (f"system.fallback={'[' * 1_500}{']' * 1_500}", "its values are nested too deeply"),
]


@pytest.mark.parametrize(("argument", "message"), REFUSED_VALUES)
def test_value_that_no_command_could_take__is_refused(argument: str, message: str) -> None:
    error = MoecastError if "~nosuchuser" in argument else ConfigError
    with pytest.raises(error, match=message):
        compose_typed(GenerateConfig, [argument])


def test_paths__may_have_names_that_are_not_utf8() -> None:
    assert compose_typed(GenerateConfig, ["store.path=a\udcff"])[0].store.path == Path("a\udcff")


REFUSED_FILES = [
    ("budgte: 5%", "yaml: unknown option 'budgte'. Did you mean 'budget'"),
    ("system: promo", "yaml: unknown system 'promo'"),
    ("seed: many", "yaml: seed=many: must be a valid integer"),
    ("- a", "yaml: expected options"),
    ("a: [", "yaml: not YAML"),
    (f"seed: {'[' * 1_500}{']' * 1_500}", "nested too deeply"),
    ("prompts: &a [*a]", "more than 100,000 values"),
    (BOMB, "more than 100,000 values"),
    ("seed: !!python/object/apply:os.system ['true']", "not YAML"),
    ("seed: 1\nseed: 2", "not YAML"),
    ("prompt: !!binary aGk=", "not YAML"),
    ("prompt: [a, b]", "prompt"),
    ("temperature: .inf", "temperature=inf: must be a finite number"),
    ("1: 2", "unknown option '1'"),
    ("? [a]\n: 2", "options.yaml"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED_FILES)
def test_file_of_options__is_refused_if_it_is_none(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        compose_typed(GenerateConfig, [], [file])


def test_paths__begin_at_the_home_folder_with_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config, _ = compose_typed(GenerateConfig, ["store.path=~/store", "prompt=~/text"])
    assert (config.store.path, config.prompt) == (Path("/home/me/store"), "~/text")


def test_error_line__has_a_limited_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("zoo", [], ["x" * 1_000_000]) == 2
    assert len(capsys.readouterr().err) < 5000
