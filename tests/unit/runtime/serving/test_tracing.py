"""The spans of requests to a running server, read back from OpenTelemetry's in-memory exporter."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from predictors.errors import MoecastError
from runtime.serving.observe.tracing_settings import choose_exporter, open_tracing
from tests.builders.serving import RunningServer, running_server, tiny
from tests.builders.waiting import wait_for
from tests.unit.runtime.serving.test_completions import CHAT, COMPLETIONS, HELLO

pytest.importorskip("opentelemetry.sdk", reason="pip install 'moecast[tracing]'")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from runtime.serving.observe import tracing
from runtime.serving.observe.tracing import Tracing, make_provider

BODY = {"prompt": "The heart", "max_tokens": 6, "ignore_eos": True, "temperature": 0}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
"""Of the example in W3C's Trace Context."""


@dataclass
class TracedServer:
    server: RunningServer
    exporter: InMemorySpanExporter

    def spans(self) -> dict[str, list[ReadableSpan]]:
        """By name, in the order of their starts; ends the server, which completes them."""
        self.server.end()
        self.server.wait_end()
        spans: dict[str, list[ReadableSpan]] = {}
        for span in sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time):
            spans.setdefault(span.name, []).append(span)
        return spans


def recording() -> tuple[InMemorySpanExporter, TracerProvider]:
    """A provider, and the exporter of its spans."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter, provider


@pytest.fixture
def traced(folder):
    exporter, provider = recording()
    limits = {"max_running": 1, "max_waiting": 3}
    with running_server(lambda: tiny(folder), tracing=Tracing(provider), **limits) as server:
        yield TracedServer(server, exporter)


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def assert_has(thing: Any, expected: dict[str, Any]) -> None:
    """Checks some of the attributes of a span, an event or a resource."""
    attributes = dict(thing.attributes)
    assert attributes | expected == attributes


def test_request__is_a_span_of_standard_attributes_in_the_clients_trace(traced):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    path = f"{COMPLETIONS}/"
    response = traced.server.post(path, json=BODY | {"top_k": 3}, headers=headers)
    spans = traced.spans()
    (request,), (answer,) = spans["POST /v1/completions"], spans["text_completion tiny"]
    assert (request.kind, f"{parent_of(request):016x}") == (SpanKind.SERVER, PARENT)
    assert_has(request, {"http.route": "/v1/completions", "http.response.status_code": 200})
    everything = [span for found in spans.values() for span in found]
    assert {f"{span.context.trace_id:032x}" for span in everything} == {TRACE}
    usage = response.json()["usage"]
    expected = {
        "gen_ai.operation.name": "text_completion", "gen_ai.request.max_tokens": 6,
        "gen_ai.request.top_k": 3, "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 6, "gen_ai.response.finish_reasons": ("length",),
        "moecast.request_id": "mine",
    }  # fmt: skip
    assert_has(answer, expected)
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    assert {name for name in answer.attributes if not name.startswith("moecast.")} <= known
    operations = {entry.value for entry in gen_ai_attributes.GenAiOperationNameValues}
    assert set(tracing.OPERATIONS.values()) <= operations
    assert "The heart" not in str([span.to_json() for span in everything])


def test_answer__consists_of_queue_prefill_and_decode(traced: TracedServer) -> None:
    traced.server.post(COMPLETIONS, json=BODY)
    spans = traced.spans()
    (request,), (answer,) = spans["POST /v1/completions"], spans["text_completion tiny"]
    phases = [spans[name][0] for name in ("queue", "prefill", "decode")]
    assert parent_of(request) is None
    assert parent_of(answer) == request.context.span_id
    assert {parent_of(phase) for phase in phases} == {answer.context.span_id}
    times = [time for phase in phases for time in (phase.start_time, phase.end_time)]
    assert times == sorted(times)
    assert times[1::2][:2] == times[2::2]  # each begins where the last one ends
    assert (times[0], times[-1]) == (answer.start_time, answer.end_time)
    assert request.start_time <= answer.start_time
    assert answer.end_time <= request.end_time
    assert [(phase.attributes or {}).get("moecast.num_steps") for phase in phases] == [None, 1, 5]


def test_chat__has_a_span_for_each_answer_streamed_or_not(traced: TracedServer) -> None:
    body = {"messages": HELLO, "max_tokens": 3, "ignore_eos": True, "n": 2, "stream": True}
    assert traced.server.post(CHAT, json=body).text.endswith("data: [DONE]\n\n")
    spans = traced.spans()
    (request,), answers = spans["POST /v1/chat/completions"], spans["chat tiny"]
    assert [parent_of(answer) for answer in answers] == [request.context.span_id] * 2
    assert max(answer.end_time for answer in answers) <= request.end_time
    first, second = (answer.attributes["gen_ai.request.seed"] for answer in answers)
    assert second == first + 1


def test_queue__lasts_until_the_answer_before_has_ended(traced: TracedServer) -> None:
    assert traced.server.post(COMPLETIONS, json=BODY | {"n": 2}).status_code == 200
    spans = traced.spans()
    first = spans["text_completion tiny"][0].context.span_id
    ends = {parent_of(span): span.end_time for span in spans["decode"]}
    queues = {parent_of(span): span.end_time for span in spans["queue"]}
    (second,) = set(queues) - {first}
    assert queues[second] >= ends[first] > queues[first]


def test_stalls__are_sums_and_events_above_a_threshold(traced, monkeypatch):
    # Far above the stalls of the steps themselves, which a busy machine makes long.
    monkeypatch.setattr(tracing, "STALL_SECONDS", 100.0)
    steps, loop = traced.server.steps, traced.server.service.loaded.model.moecast.engine.loop
    before, stalls = loop.stall_seconds, {1: 300.0, 2: 10.0, 4: 200.0}

    def stall(_choices: object) -> None:
        loop.stall_seconds += stalls.get(steps.num_steps, 0.0)

    steps.after_step = stall
    traced.server.post(COMPLETIONS, json=BODY)
    spans = traced.spans()
    (prefill,), (decode,) = spans["prefill"], spans["decode"]
    for span, step, seconds in ((prefill, 1, 300.0), (decode, 4, 200.0)):
        (event,) = span.events
        assert event.name == "stall"
        assert event.attributes["moecast.stall_seconds"] == pytest.approx(seconds, abs=90.0)
        assert_has(event, {"moecast.num_tokens": step, "moecast.num_sequences": 1})
        assert event.attributes["moecast.step_seconds"] > 0
        assert span.start_time <= event.timestamp <= span.end_time
    total = sum(span.attributes["moecast.stall_seconds"] for span in (prefill, decode))
    assert total == pytest.approx(loop.stall_seconds - before)


REFUSED = [({"prompt": "a", "max_tokens": -1}, 400), (BODY | {"model": "other"}, 404)]


@pytest.mark.parametrize(("body", "status"), REFUSED)
def test_refused_request__has_its_status_and_no_answer(traced, body, status):
    assert traced.server.post(COMPLETIONS, json=body).status_code == status
    ((request,),) = traced.spans().values()
    assert_has(request, {"http.response.status_code": status})
    assert request.status.status_code is StatusCode.UNSET  # the client's fault


def test_other_paths__have_no_spans(traced: TracedServer) -> None:
    assert traced.server.get("/v1/models").status_code == 200
    assert traced.server.post("/tokenize", json={"prompt": "a"}).status_code == 200
    assert traced.spans() == {}


def test_answer__that_fails_has_the_errors_code(traced: TracedServer) -> None:
    server = traced.server
    server.steps.hold()
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(server.post, COMPLETIONS, json=BODY)
        wait_for(lambda: server.service.num_running > 0)
        server.end()
        server.end()
        assert answered.result().status_code == 503
        server.steps.release()
    spans = traced.spans()
    (answer,), (request,) = spans["text_completion tiny"], spans["POST /v1/completions"]
    assert answer.status.status_code is request.status.status_code is StatusCode.ERROR
    assert answer.attributes["error.type"] == "shutting_down"
    assert request.attributes["error.type"] == "503"


def test_server__without_tracing_uses_no_provider_of_others(folder, monkeypatch):
    exporter, provider = recording()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    with running_server(lambda: tiny(folder)) as server:
        assert server.post(COMPLETIONS, json=BODY).status_code == 200
    assert exporter.get_finished_spans() == ()


def test_provider__takes_its_names_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def resource() -> Any:
        provider = make_provider("1.2", prints=True)
        provider.shutdown()
        return provider.resource

    assert_has(resource(), {"service.name": "moecast", "service.version": "1.2"})
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    named = {"service.name": "mine", "deployment.environment.name": "test"}
    assert_has(resource(), named | {"service.version": "1.2"})


def test_close__does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.05)
    provider, stuck = TracerProvider(shutdown_on_exit=False), threading.Event()
    monkeypatch.setattr(provider, "shutdown", stuck.wait)
    Tracing(provider).close()
    stuck.set()


COLLECTOR = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


EXPORTERS = [
    ({}, "none"),
    ({"OTEL_SERVICE_NAME": "mine", "OTEL_EXPORTER_OTLP_ENDPOINT": ""}, "none"),
    (COLLECTOR, "otlp"),
    ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, "otlp"),
    ({"OTEL_TRACES_EXPORTER": "otlp"}, "otlp"),
    (COLLECTOR | {"OTEL_TRACES_EXPORTER": "none"}, "none"),
    (COLLECTOR | {"OTEL_SDK_DISABLED": "TRUE"}, "none"),
    (COLLECTOR | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "otlp"),
    ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
]


@pytest.mark.parametrize(("environment", "exporter"), EXPORTERS)
def test_exporter__is_chosen_by_the_standard_variables(environment, exporter):
    assert choose_exporter(environment) == exporter


def test_variables__that_ask_for_the_unsupported_are_refused() -> None:
    with pytest.raises(MoecastError, match="unknown OTEL_TRACES_EXPORTER 'zipkin'.*otlp"):
        choose_exporter({"OTEL_TRACES_EXPORTER": "zipkin"})
    with pytest.raises(MoecastError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL=grpc.*4318"):
        choose_exporter(COLLECTOR | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_tracing__without_a_variable_or_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "runtime.serving.observe.tracing", raising=False)
    assert open_tracing({}, version="1") is None
    with pytest.raises(MoecastError, match=r"pip install 'moecast\[tracing\]'"):
        open_tracing(COLLECTOR, version="1")
