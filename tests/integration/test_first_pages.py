"""The commands of `README.md` and `docs/quickstart.md`, run as they stand there.

Lines that install are those of `make`, which every test run begins with. The README's commands for
a large model run with a tiny checkpoint: what `docs/tutorial.md` has too is run by its own test,
with more options, and a server's options are tried with `generate`, which starts faster.
"""

import io

import pytest

from tests.builders import pages
from tests.builders.recordable import recordable

README, QUICKSTART = "README.md", "docs/quickstart.md"
LARGE, SMALL = "Qwen/Qwen3-30B-A3B", "models/My-Model"
BUNDLED = "qwen2-moe-tiny"
INSTALLS = ("git clone", "cd ", "pip install", "python3 -m venv", "source ")


def commands_with(page: str, *words: str) -> list[str]:
    return [line for line in pages.read_commands(page) if all(word in line for word in words)]


def shorten(line: str) -> str:
    """The command with a short answer, if it generates any, or a short measurement."""
    shorter = dict.fromkeys(("moecast generate", "moecast chat"), "max_new_tokens=8")
    shorter["moecast doctor"] = "seconds=1"
    return line if "max_new_tokens" in line else pages.add_options(line, shorter)


def test_readme__is_short_and_says_its_status_before_it_tells_of_large_models() -> None:
    text = (pages.ROOT / README).read_text()
    assert len(text.splitlines()) <= 150
    first, _, status = text.partition("**Status:**")
    assert "## First answer" in first
    assert "## Your model" in status


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """The server of both pages, on a free port."""
    (line,) = commands_with(README, "moecast serve", BUNDLED)
    assert commands_with(QUICKSTART, "moecast serve") == [line]
    port = pages.free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("server"))
        with pages.serve_in_background(line.replace("port=8000", f"port={port}"), port=port):
            yield port


def test_pages__an_answer_takes_few_commands(port, tmp_path, monkeypatch, capsys):
    clone, enter, make, activate, install, serve, curl, generate = pages.read_commands(README)[:8]
    assert (clone, enter) == ("git clone REPOSITORY moecast", "cd moecast")
    assert (make, activate) == ("python3 -m venv .venv", "source .venv/bin/activate")
    assert install.startswith("pip install -c constraints.txt -e . ")
    assert serve.startswith("moecast serve ")
    assert curl in pages.read_commands(QUICKSTART)
    answer = pages.run_curl(curl.replace("localhost:8000", f"127.0.0.1:{port}"))
    assert (answer["model"], answer["usage"]["completion_tokens"]) == (BUNDLED, 16)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    pages.run_command(generate)
    assert capsys.readouterr().out == answer["choices"][0]["text"] + "\n"


@pytest.mark.parametrize("page", [README, QUICKSTART])
def test_pages__python_runs(page: str, port: int, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in pages.read_python(page):
        text = text.replace("localhost:8000", f"127.0.0.1:{port}")
        exec(compile(text, page, "exec"), {})


def test_pages__commands_with_the_included_model_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/stats\n/quit\n"))
    for line in pages.read_commands(README)[8:] + pages.read_commands(QUICKSTART):
        is_elsewhere = LARGE in line or line.startswith((*INSTALLS, "curl ", "moecast serve"))
        if not is_elsewhere and "zoo push" not in line:
            pages.run_command(shorten(line))


def test_readme__commands_for_a_large_model_run_with_a_tiny_one(tmp_path, monkeypatch):
    recordable(tmp_path / SMALL, num_layers=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/quit\n"))
    words = {f"{LARGE} model.local_only=false": SMALL, LARGE: SMALL, "GiB": "MiB"}
    lines = [pages.replace_words(line, words) for line in commands_with(README, "moecast")]
    lines = [line for line in lines if SMALL in line or "zoo push" in line]
    tutorial = [set(line.split()) for line in pages.read_commands("docs/tutorial.md")]
    own = [line for line in lines if not any(set(line.split()) <= longer for longer in tutorial)]
    for line in own:
        pages.run_command(shorten(line.replace("moecast serve", "moecast generate")))
    assert [line.split()[1] for line in own] == ["doctor", "pack", "serve", "chat", "serve"]
