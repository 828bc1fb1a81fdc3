"""Options in every form that a command line has, and bare values."""

from pathlib import Path

import pytest

from configs.arguments import read_arguments
from predictors.errors import ConfigError

TYPES = {"verify": bool, "model.local_only": bool, "budget": str, "seed": int, "prompt": str}


def find_type(key: str):
    if key not in TYPES:
        raise ConfigError(f"unknown option {key!r}")
    return TYPES[key]


def read(*argv: str) -> list[str]:
    return read_arguments(argv, ("model", "prompt"), find_type=find_type).options


READ_AS = [
    (["budget=50%"], ["budget=50%"]),
    (["--budget", "50%"], ["budget=50%"]),
    (["--budget="], ["budget="]),
    (["max-new-tokens=8"], ["max_new_tokens=8"]),
    (["--verify"], ["verify=true"]),
    (["--no-verify"], ["verify=false"]),
    (["--verify", "off", "--seed", "1"], ["verify=false", "seed=1"]),
    (["--model.local-only", "false"], ["model.local_only=false"]),
    (["--verify", "a/b"], ["model=a/b", "verify=true"]),
    (["--seed", "-1"], ["seed=-1"]),
    (["--prompt=--x"], ["prompt=--x"]),
    (["prompt=-m"], ["prompt=-m"]),
    (["--prompt", "- one\n- two"], ["prompt=- one\n- two"]),
    (["a/b", "budget=1", "--seed", "2"], ["model=a/b", "budget=1", "seed=2"]),
    (["budget=1", "a/b"], ["model=a/b", "budget=1"]),
    (["a/b", "Some text"], ["model=a/b", "prompt=Some text"]),
    (["x + y = z"], ["prompt=x + y = z"]),
]


@pytest.mark.parametrize(("argv", "options"), READ_AS)
def test_arguments__become_key_and_value(argv: list[str], options: list[str]) -> None:
    assert read(*argv) == options


def test_bare_folder_with_a_space__is_the_model(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my model").mkdir()
    assert read("my model") == ["model=my model"]


WRONG_ARGUMENTS = [
    (["--budget"], "--budget needs a value"),
    (["--budget", "--seed", "1"], "--budget needs a value; .* --budget=VALUE"),
    (["--budget", "-m"], "--budget needs a value"),
    (["--config"], "--config needs a value"),
    (["--no-budget"], "'budget' is not on or off; write budget=VALUE"),
    (["--"], "'--' is not an option"),
    (["a/b", "text", "more"], "'more' is not an option"),
    (["a/b", "model=c"], "model is given twice"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG_ARGUMENTS)
def test_wrong_argument__is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(*argv)


TOPICS = [
    (["--help"], ""), (["a/b", "-h"], ""), (["--help", "all"], "all"),
    (["--help=system"], "system"), (["seed=1"], None),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "topic"), TOPICS)
def test_help__takes_a_topic(argv: list[str], topic: str | None) -> None:
    assert read_arguments(argv, ("model",), find_type=find_type).help_topic == topic


def test_config_files_and_sweep__are_kept_apart() -> None:
    argv = ["--config", "a.yaml", "-m", "seed=1,2", "--config=b.yaml"]
    arguments = read_arguments(argv, (), find_type=find_type)
    assert arguments.files == [Path("a.yaml"), Path("b.yaml")]
    assert arguments.is_sweep
    assert arguments.options == ["seed=1,2"]
