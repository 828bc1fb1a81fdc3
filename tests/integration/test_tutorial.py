"""`docs/tutorial.md`, command by command, with a tiny checkpoint in place of the reader's model."""

import json
import random
import shlex
from pathlib import Path

import pytest
import torch

from tests.builders import pages
from tests.builders.hub import fake_hub
from tests.builders.processes import run_python
from tests.builders.recordable import recordable

PAGE = "docs/tutorial.md"
MODEL = "models/My-Model"
SHORTER = {
    "moecast doctor": "seconds=1 budget=50%",
    "moecast collect": "data.num_prompts=48 data.max_prompt_tokens=48 data.max_new_tokens=6",
    "moecast train": "max_epochs=2 predictor.width=64 replay_tokens=16",
    "moecast evaluate": "replay_tokens=60 workers=1 figures=false",
}
"""Options that the page leaves at their defaults, for seconds in place of minutes."""
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box with liquor jugs".split()  # noqa: SIM905


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder: the model and a file of prompts."""
    (tmp_path / "models").mkdir()
    # In bf16, as users have it: what is trained for it must fit in every command and in Python.
    recordable(tmp_path / MODEL, num_layers=4, num_experts=16, dtype=torch.bfloat16)
    choose = random.Random(0)
    prompts = [{"prompt": " ".join(choose.choices(WORDS, k=9))} for _ in range(80)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_tutorial__leads_from_a_model_to_a_server(workplace, monkeypatch, capsys, caplog):
    """The server has the predictors that were trained for the checkpoint."""
    port = pages.free_port()
    ports = {"port=8000": f"port={port}", "localhost:8000": f"127.0.0.1:{port}"}
    commands = [pages.replace_words(line, ports) for line in pages.read_commands(PAGE)]
    serve = next(line for line in commands if line.startswith("moecast serve"))
    curl = next(line for line in commands if line.startswith("curl"))
    for line in (line for line in commands if line not in (serve, curl)):
        if "hf://" in line:
            push_to_hub(line)
            continue
        if line.startswith("moecast zoo pull"):
            # The other machine has another zoo.
            monkeypatch.setenv("MOECAST_CACHE", str(workplace / "other machine"))
        pages.run_command(pages.add_options(line, SHORTER))
    assert (workplace / "runs/mine/report/report.html").is_file()
    check_scores(workplace)
    assert "my-model/residual" in capsys.readouterr().out
    caplog.clear()
    with pages.serve_in_background(serve, port=port):
        answer = pages.run_curl(curl)
    assert answer["usage"]["completion_tokens"] == 16
    for text in pages.read_python(PAGE):
        names: dict = {}
        exec(compile(text, PAGE, "exec"), names)
        assert names["model"].moecast.engine.driver.predictor_kind == "residual"
    assert capsys.readouterr().out.strip() == "Qwen2MoeForCausalLM"
    assert "no trained predictors" not in caplog.text


def check_scores(workplace: Path) -> None:
    """The page promises: better than the routers alone, and better than on demand."""
    predictors = json.loads((workplace / "runs/mine/results.json").read_text())["predictors"]
    assert predictors["residual"]["mean_accuracy"] > predictors["skip"]["mean_accuracy"]
    rows = json.loads((workplace / "runs/evaluate/results.json").read_text())["rows"]
    hits = {(row["system"], row["budget"]): row["hit_rate"] for row in rows}
    for budget in ("25%", "50%"):
        assert hits["on-demand", budget] < hits["moecast", budget]
    assert all(0 < row["of_bound"] <= 1 + 1e-9 for row in rows)


def push_to_hub(line: str) -> None:
    """Publishes on a stand-in for the Hub, whose address is read when a process starts."""
    with fake_hub() as (address, repositories):
        hub = {"HF_ENDPOINT": address, "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0"}
        run_python("-m", *shlex.split(line), folder=Path.cwd(), environment=hub)
        _, files = repositories.commits["OWNER/REPOSITORY"][-1]
        assert "my-model/residual" in json.loads(files["index.json"])["entries"]
