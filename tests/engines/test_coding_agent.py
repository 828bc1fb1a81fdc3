"""A coding agent mends a program through each API of the server; its answers are forced."""

import json
import os
from collections.abc import Iterator

import pytest

from tests.builders.forced_text import HERMES_TEMPLATE, force_text
from tests.builders.models import set_fields
from tests.builders.processes import run
from tests.builders.serving import RunningServer, running_server, speaking_model, tiny
from tests.docs.client_lines import MODEL, client_lines

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

BROKEN, MENDED = "print(6 * 7 + 1)\n", "print(6 * 7)\n"
COMMANDS = (
    "cat answer.py",
    "sed -i 's/ + 1//' answer.py && python3 answer.py",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
)
SCRIPT = [
    "<think>\nStep by step.\n</think>\n\nI do this.\n<tool_call>\n"
    + json.dumps({"name": "bash", "arguments": {"command": command}})
    + "\n</tool_call>"
    for command in COMMANDS
]
APIS = {
    "chat": (f"openai/{MODEL}", "/v1", "litellm"),
    "responses": (f"openai/{MODEL}", "/v1", "litellm_response"),
    "messages": (f"anthropic/{MODEL}", "", "litellm"),
}
"""Name of the model, path of the API, and the agent's kind of model."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = speaking_model(tmp_path_factory.mktemp("model"))
    # The agent's instructions alone are longer than the model's usual context.
    set_fields(folder, max_position_embeddings=1 << 15)
    template = folder / "hermes.jinja"
    template.write_text(HERMES_TEMPLATE)
    with running_server(lambda: tiny(folder, chat_template=template, served_name=MODEL)) as running:
        yield running


@pytest.mark.parametrize("api", APIS)
def test_coding_agent__mends_a_program(server, client_programs, tmp_path, monkeypatch, api):
    program = client_programs("mini-swe-agent") / "mini"
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "answer.py").write_text(BROKEN)
    model, base, kind = APIS[api]
    force_text(monkeypatch, *SCRIPT)
    # The page's command, with another API's address and name of the model.
    _, line = client_lines(server.url)["mini-swe-agent"].splitlines()
    line = line.replace(f"openai/{MODEL}", model).replace("/v1", base)
    command: list[object] = [program, *line.split()[1:]]
    command += ["--yolo", "--exit-immediately", "--output", tmp_path / "log", "--cost-limit", 0]
    command += ["--model-class", kind, "--config", "model.model_kwargs.max_tokens=400"]
    command += ["--task", "answer.py prints 43 instead of 42: mend it."]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "MSWEA_CONFIGURED": "true"}
    environment |= {"OPENAI_API_KEY": "any", "ANTHROPIC_API_KEY": "any"}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_COST_TRACKING": "ignore_errors"}
    done = run(*command, folder=folder, environment=environment, timeout=300)
    assert (folder / "answer.py").read_text() == MENDED, done.stdout[-5000:]
    log = (tmp_path / "log").read_text()
    assert '"exit_status": "Submitted"' in log
    assert "42" in log
