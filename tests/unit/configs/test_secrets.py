"""Secrets of the command line end in no file and in no output."""

import pytest

from configs.cli import main
from configs.invocation import Invocation
from runtime.serving.config import ServeConfig
from tests.builders.commands import command_of

KEY, LOGIN = "s3cr3t-of-mine", "some%40one:pass@word"
ADDRESS = f"https://{LOGIN}@example.org/zoo"


def leaks(text: str) -> list[str]:
    return [part for part in (KEY, LOGIN, "pass@word", "other:pass") if part in text]


def echoes(config: ServeConfig) -> dict:
    return {"key": config.api_key, "nested": [{"where": f"at {config.predictor}"}], "ids": (1, 2)}


def fails(config: ServeConfig) -> None:
    raise OSError(f"{config.api_key} at {config.predictor}, or http://other:pass@host/x")


def waits(config: ServeConfig) -> None:
    raise KeyboardInterrupt(f"{config.api_key} at {config.predictor}")


OPTIONS = {"config": "runtime.serving.config:ServeConfig", "needs_run": True}
COMMANDS = tuple(command_of(run, **OPTIONS) for run in (echoes, fails, waits))


COMMAND_LINES = [
    [f"api_key={KEY}", f"predictor={ADDRESS}"],
    [f"+api_key={KEY}", f"+predictor={ADDRESS}"],
    [f"++api-key={KEY}", f"--predictor={ADDRESS}"],
    ["--api-key", KEY, "--predictor", ADDRESS],
    [f"--api_key={KEY}", f"predictor={ADDRESS}", "debug=true"],
    ["-m", f"api_key={KEY},x{KEY}", f"predictor='{ADDRESS}'"],
    ["-m", f"api_key='{KEY}'", f"predictor={ADDRESS},{ADDRESS}/b"],
    ["--config", "options.yaml"],
    ["--config", "options.yaml", f"api_key={KEY}2", "max_running=no"],
    [f"api_key={KEY}", f"predictor={ADDRESS}", "sede=3"],
    [f"api_key={KEY}", ADDRESS, ADDRESS],
    ["--api-key", KEY, ADDRESS],
    [f"api_key={KEY}\udcff"],
]


@pytest.mark.parametrize("command", ["echoes", "fails", "waits"])
@pytest.mark.parametrize("options", COMMAND_LINES)
def test_secrets__are_in_no_file_and_no_output(command, options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "options.yaml").write_text(f"api_key: {KEY}\npredictor: {ADDRESS}\n")
    main("runtime", COMMANDS, [command, *options])
    (tmp_path / "options.yaml").unlink()
    output = "".join(capsys.readouterr())
    assert output
    assert not leaks(output)
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and leaks(file.read_text())]


def test_records__keep_the_rest_of_an_address(tmp_path) -> None:
    options = [f"api_key={KEY}", f"predictor={ADDRESS}", f"run_dir={tmp_path}"]
    assert main("runtime", COMMANDS, ["echoes", *options]) == 0
    assert "https://(hidden)@example.org/zoo" in (tmp_path / "run.json").read_text()
    assert "at https://(hidden)@example.org/zoo" in (tmp_path / "results.json").read_text()


def test_text__that_only_contains_an_address_is_kept() -> None:
    text = "Say http://a:bcdefg@h aloud"
    invocation = Invocation(called="moecast", argv=[], secret_names=["api_key"], secrets={"u:p@"})
    invocation.add_secrets([("prompt", text)])
    assert invocation.secrets == {"u:p@"}
    assert invocation.hide(text) == text
    assert invocation.clean_line(f"error: {text}") == "error: Say http://(hidden)@h aloud"
