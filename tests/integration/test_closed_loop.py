"""`docs/closed-loop.md`, command by command, with a tiny checkpoint in place of the model."""

import json
import random
import stat

import httpx2

from collect.traces import Trace
from tests.builders import pages
from tests.builders.recordable import LETTERS, recordable
from tests.builders.serving import WAIT_SECONDS

PAGE = "docs/closed-loop.md"
SHORTER = {
    "moecast collect": "data.max_new_tokens=3",
    "moecast train": "max_epochs=1 batch_size=64 predictor.width=16 replay_tokens=4 figures=false",
    "moecast zoo": "replay_tokens=4 model.id=models/tiny model.name=tiny",
}
"""Options that the page leaves at their defaults, for seconds in place of minutes."""
NUM_PROMPTS = 20
"""In one HTTP request."""


def ask(port: int) -> None:
    choose = random.Random(0)
    prompts = ["".join(choose.choices(LETTERS, k=6)) for _ in range(NUM_PROMPTS)]
    body = {"prompt": prompts, "max_tokens": 5}
    url = f"http://127.0.0.1:{port}/v1/completions"
    answer = httpx2.post(url, json=body, timeout=WAIT_SECONDS)
    assert answer.status_code == 200, answer.text


def test_closed_loop__leads_from_requests_to_predictors(tmp_path, monkeypatch, caplog) -> None:
    recordable(tmp_path / "models/tiny", num_layers=4)
    monkeypatch.chdir(tmp_path)
    port = pages.free_port()
    words = {" qwen2-moe-tiny ": " models/tiny ", "qwen2-moe-tiny": "tiny", "8000": str(port)}
    first, *between, last = (pages.replace_words(line, words) for line in pages.read_commands(PAGE))
    with pages.serve_in_background(first, port=port):
        ask(port)
    recorded = tmp_path / "served.jsonl"
    assert stat.S_IMODE(recorded.stat().st_mode) == 0o600
    lines = [json.loads(line)["tokens"] for line in recorded.read_text().splitlines()]
    assert [len(tokens) for tokens in lines] == [6] * NUM_PROMPTS
    for line in between:
        is_short = line.startswith("moecast zoo ") and " score " not in line
        pages.run_command(line if is_short else pages.add_options(line, SHORTER))
    assert Trace.open(tmp_path / "runs/traces/served").num_tokens == NUM_PROMPTS * (6 + 3)
    caplog.clear()
    # With the options of a server, which starts slower.
    assert last.startswith("moecast serve ")
    generate = last.replace("moecast serve", "moecast generate").replace(f" port={port}", "")
    # On the computing thread: on a busy machine another one may forecast too late to be counted.
    pages.run_command(f"{generate} system.synchronous=true max_new_tokens=2 run_dir=runs/last")
    assert "no trained predictors" not in caplog.text
    assert json.loads((tmp_path / "runs/last/results.json").read_text())["stats"]["predicted"] > 0
