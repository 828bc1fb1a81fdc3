"""`python -m runtime serve` as a process: what it says, what it leaves, how it ends."""

import json
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import psutil
import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.serving.server import server
from configs.cli import main
from runtime.__main__ import COMMANDS
from runtime.config import BUILTIN_MODELS
from tests.builders.models import plain_eager
from tests.builders.serving import speaking_model

REFERENCE = BUILTIN_MODELS / "qwen2_moe_tiny"
PROMPTS = [
    "The heart pumps blood",
    "Return a new list",
    "It was late in the evening when the old man came to the door",
    "def",
]
PATIENCE = 60.0


def greedy(folder: Path, prompts: list[str], number: int) -> list[str]:
    """Texts of plain Transformers."""
    tokenizer, plain = (
        AutoTokenizer.from_pretrained(folder),
        plain_eager(folder, dtype=torch.float32),
    )
    found = []
    for prompt in prompts:
        inputs = torch.tensor([tokenizer(prompt)["input_ids"]])
        tokens = plain.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=number, do_sample=False
        )
        found.append(tokenizer.decode(tokens[0, inputs.shape[1] :], skip_special_tokens=True))
    return found


def test_reference_model__is_served_to_several_at_once_with_prefetching(tmp_path: Path) -> None:
    options = {"predictor": "skip", "budget": "30%", "key": "a-secret"}
    with server(options, folder=tmp_path) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="a-secret", timeout=PATIENCE)

        def ask(prompt: str) -> str:
            done = client.completions.create(
                model="qwen2-moe-tiny", prompt=prompt, max_tokens=8, temperature=0
            )
            return done.choices[0].text

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            found = list(pool.map(ask, PROMPTS))
        assert found == greedy(REFERENCE, PROMPTS, 8)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong").models.list()
        children = psutil.Process(served.process.pid).children(recursive=True)
        assert served.end()["exit_code"] == 0
        assert not any(child.is_running() for child in children)
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        assert results["ended"] == "SIGTERM"
        assert results["stats"]["bytes_prefetched"] > 0
        kept = [path.read_text() for path in (tmp_path / "run").iterdir()]
        assert all("a-secret" not in text for text in [*kept, served.log.read_text()])
        config = json.loads((tmp_path / "run" / "run.json").read_text())
        assert config["config"]["key"] == "(not kept)"
        assert "key=(not kept)" in config["argv"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("speaking"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal__lets_what_was_accepted_end(folder: Path, tmp_path: Path, number: int) -> None:
    with server({"model.id": folder, "max_running": 1}, folder=tmp_path) as served:
        body = {"prompt": "The", "max_tokens": 60, "temperature": 0, "stream": True}
        with (
            httpx2.Client(base_url=served.url, timeout=PATIENCE) as client,
            client.stream("POST", "/v1/completions", json=body) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            served.process.send_signal(number)
            assert list(lines)[-2] == "data: [DONE]"
        assert served.process.wait(PATIENCE) == 0


def test_signal_without_grace__ends_at_once(folder: Path, tmp_path: Path) -> None:
    with server({"model.id": folder, "grace": 0}, folder=tmp_path) as served:
        body = {"prompt": "The", "max_tokens": 2000, "temperature": 0, "stream": True}
        with (
            httpx2.Client(base_url=served.url, timeout=PATIENCE) as client,
            client.stream("POST", "/v1/completions", json=body) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            *_, last, _, done, _ = lines
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert done == "data: [DONE]"
        assert served.process.wait(PATIENCE) == 0


def test_signal_while_it_loads__ends_it(tmp_path: Path) -> None:
    with server(folder=tmp_path, ready=False) as served:
        assert served.end()["exit_code"] == 0


def test_model_that_is_not_there__is_one_line_and_code_2(tmp_path: Path) -> None:
    options = {"model.id": tmp_path / "nowhere"}
    with server(options, folder=tmp_path, ready=False) as served:
        assert served.process.wait(PATIENCE) == 2
    errors = [line for line in served.log.read_text().splitlines() if not line.startswith("{")]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert "nowhere" in errors[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["host=0.0.0.0", "port=0"], "set key=... or MOECAST_API_KEY"),
        (["host=192.0.2.1", "port=0", "key=k"], "cannot listen there"),
        (["port=70000"], "at most 65535"),
        (["key=@/nowhere"], "cannot read the file"),
        (["key="], "holds no key"),
        (["max_body=lots"], "max_body"),
        (["max_running=0"], "max_running=0"),
    ],
)
def test_wrong_option__is_one_line_and_code_2(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("runtime", COMMANDS, ["serve", f"run_dir={tmp_path}", *options]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_port_that_is_taken__is_said_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main("runtime", COMMANDS, ["serve", f"run_dir={tmp_path}", f"port={port}"]) == 2
    assert "choose another port" in capsys.readouterr().err


def test_missing_extra__names_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setattr(
        "runtime.commands.serve.find_spec", lambda name: None if name == "uvicorn" else object()
    )
    assert main("runtime", COMMANDS, ["serve", f"run_dir={tmp_path}"]) == 2
    assert capsys.readouterr().err == "error: serve needs uvicorn: pip install '.[serve]'\n"
