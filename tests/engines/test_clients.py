"""The lines of the page of clients, each with the client's package in an environment of its own."""

import os
from collections.abc import Iterator

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


@pytest.mark.parametrize("name", [*PYTHON, "llm"])
def test_lines__connect_the_client(server, client_programs, monkeypatch, tmp_path, name):
    programs, lines = client_programs(PYTHON.get(name, name)), client_lines(server.url)[name]
    command: list[object] = [programs / "python", "-c", lines]
    if name == "llm":  # a program, whose lines are its file of models
        (tmp_path / "extra-openai-models.yaml").write_text(lines)
        command = [programs / "llm", "-m", "moecast", "Hello"]
    force_text(monkeypatch, ANSWER)
    # The client knows nothing of this machine.
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    environment |= {"LLM_USER_PATH": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    assert "Paris" in run(*command, folder=tmp_path, environment=environment, timeout=240).stdout
