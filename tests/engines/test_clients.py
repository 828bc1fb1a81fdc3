"""The lines of the page of clients, each with the client's package in an environment of its own."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.builders.forced_text import force_text
from tests.builders.processes import run
from tests.builders.serving import RunningServer, running_server, speaking_model, tiny
from tests.docs.client_lines import MODEL, PYTHON, client_lines

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
ANSWER = '{"city": "Paris"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = speaking_model(tmp_path_factory.mktemp("model"))
    with running_server(lambda: tiny(folder, served_name=MODEL)) as running:
        yield running


def run_client(command: list[object], home: Path) -> str:
    """Runs a client that knows nothing of this machine; returns what it writes."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LLM_USER_PATH": str(home)}
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    return run(*command, folder=home, environment=environment, timeout=240).stdout


@pytest.mark.parametrize("name", PYTHON)
def test_lines__connect_the_client(
    server: RunningServer,
    client_programs: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
) -> None:
    programs = client_programs(PYTHON[name])
    force_text(monkeypatch, ANSWER)
    written = run_client([programs / "python", "-c", client_lines(server.url)[name]], tmp_path)
    assert "Paris" in written


def test_llm__reads_its_file_of_models(
    server: RunningServer,
    client_programs: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    programs = client_programs("llm")
    force_text(monkeypatch, ANSWER)
    (tmp_path / "extra-openai-models.yaml").write_text(client_lines(server.url)["llm"])
    assert "Paris" in run_client([programs / "llm", "-m", "moecast", "Hello"], tmp_path)
