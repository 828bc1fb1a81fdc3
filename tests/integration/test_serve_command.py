"""`moecast serve` as a process: its output, its results and its exit."""

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import psutil
import pytest

from benchmarks.serving.server import run_server as run_command
from configs.program import run_program
from tests.builders.forked import run_server
from tests.builders.loopback import QuietHandler, serve_loopback
from tests.builders.plain_answers import PlainAnswers
from tests.builders.serving import PROMPTS
from tests.docs.tested_commands import read_block

PATIENCE = 240.0


def test_server__answers_several_clients_at_once_with_prefetching(speaking, tmp_path):
    options = {"model.id": speaking, "predictor": "skip", "budget": "50%", "api_key": "a-secret"}
    with run_server(options, folder=tmp_path) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="a-secret", timeout=PATIENCE)

        def ask(prompt: str) -> str:
            options = {"model": speaking.name, "max_tokens": 8, "temperature": 0}
            return client.completions.create(prompt=prompt, **options).choices[0].text

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            texts = list(pool.map(ask, PROMPTS))
        assert texts == PlainAnswers(speaking).texts(PROMPTS, 8)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong").models.list()
        children = psutil.Process(served.process.pid).children(recursive=True)
        assert served.stop().exit_code == 0
        assert not any(child.is_running() for child in children)
        kept = {path.name: path.read_text() for path in (tmp_path / "run").iterdir()}
        assert all("a-secret" not in text for text in [*kept.values(), served.log.read_text()])
        results, config = (json.loads(kept[name]) for name in ("results.json", "run.json"))
        assert results["ended"] == "SIGTERM"
        assert results["stats"]["bytes_prefetched"] > 0
        assert config["config"]["api_key"] == "(hidden)"
        assert "api_key=(hidden)" in config["argv"]


class CollectorHandler(QuietHandler):
    """Receives spans as OpenTelemetry's collectors do, by OTLP over HTTP."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append((self.path, body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()


def documented_variables() -> list[dict[str, str]]:
    """The variables of each command of docs/monitoring.md that turns traces on."""
    commands = [command.adapt() for command in read_block("monitoring.md", "traces")]
    assert all(command.endswith(" moecast serve") for command in commands)
    return [dict(re.findall(r"(OTEL_\w+)=(\S+)", command)) for command in commands]


def test_interrupt__finishes_accepted_requests_and_prints_their_traces(speaking, tmp_path):
    pytest.importorskip("opentelemetry.sdk", reason="pip install 'moecast[tracing]'")
    environment, _ = documented_variables()
    options = {"model.id": speaking, "max_running": 1}
    with run_server(options, environment=environment, folder=tmp_path) as served:
        body = {"prompt": "The", "max_tokens": 60, "temperature": 0, "stream": True}
        with (
            httpx2.Client(base_url=served.url, timeout=PATIENCE) as client,
            client.stream("POST", "/v1/completions", json=body) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGINT)
            assert list(lines)[-2] == "data: [DONE]"
        assert served.process.wait(PATIENCE) == 0
        printed = served.process.stdout.read().decode()
    assert '"name": "POST /v1/completions"' in printed
    assert '"name": "decode"' in printed


def test_traces__are_sent_to_a_collector_by_the_end(speaking, tmp_path) -> None:
    pytest.importorskip("opentelemetry.exporter", reason="pip install 'moecast[tracing]'")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[tuple[str, bytes]] = []
    with serve_loopback(CollectorHandler, bodies=bodies) as address:
        _, documented = documented_variables()
        port = address.rpartition(":")[2]
        environment = {name: value.replace("4318", port) for name, value in documented.items()}
        environment |= {"OTEL_SERVICE_NAME": "mine", "OTEL_BSP_SCHEDULE_DELAY": "3600000"}
        with run_server({"model.id": speaking}, environment=environment, folder=tmp_path) as served:
            body = {"prompt": "The", "max_tokens": 3}
            assert httpx2.post(f"{served.api}/completions", json=body).status_code == 200
            assert not bodies
            assert served.stop().exit_code == 0
            lines = served.log.read_text().splitlines()
    ((path, body),) = bodies
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    names = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert names["service.name"] == "mine"
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    phases = {"queue", "prefill", "decode"}
    assert set(spans) == {"POST /v1/completions", f"text_completion {speaking.name}", *phases}
    log = [json.loads(line) for line in lines if line.startswith("{")]
    (request,) = [line for line in log if line.get("path") == "/v1/completions"]
    assert {span.trace_id.hex() for span in spans.values()} == {request["trace_id"]}


def test_signal__during_loading_ends_the_server(tmp_path) -> None:
    # A fork would end without what Python does at its end.
    with run_command(folder=tmp_path, ready=False) as served:
        assert served.stop().exit_code == 0


INVALID_OPTIONS = [
    (["host=0.0.0.0", "port=0"], "set api_key=... or MOECAST_API_KEY"),
    (["host=192.0.2.1", "port=0", "api_key=k"], "cannot listen there"),
    (["api_key=@/nowhere"], "cannot read the file"),
    (["max_body=lots"], "max_body"),
]


@pytest.mark.parametrize(("options", "message"), INVALID_OPTIONS)
def test_invalid_option__is_one_line_and_exit_code_2(options, message, tmp_path, capsys):
    assert run_program("runtime", ["serve", f"run_dir={tmp_path}", *options]) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1
