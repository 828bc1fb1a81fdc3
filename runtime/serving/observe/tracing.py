"""Traces each request with OpenTelemetry; needs the extra `tracing`.

    POST /v1/chat/completions      the HTTP request, part of the client's trace if it sent one
      chat MODEL                   each of its answers
        queue, prefill, decode     with their steps and stalls

A forward pass has no span: an answer may have thousands of tokens. Prompts and texts are in none.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from opentelemetry.trace import Span, StatusCode, Tracer
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.serving.app import NO_TELEMETRY
from runtime.serving.choice import CompletionChoice, FinishReason
from runtime.serving.edge.middleware import plain_path
from runtime.serving.service import GenerationService, ServiceObserver

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
"""Paths of traced requests to `gen_ai.operation.name`."""
OPERATION = context.create_key("moecast-operation")
STALL_SECONDS = 0.05
"""Shortest stall of a step that is an event: a reader of the text notices it."""
CLOSE_SECONDS = 5.0
"""Longest wait for a collector when the server ends."""


def make_provider(version: str, *, prints: bool = False) -> TracerProvider:
    """Create what exports spans; OpenTelemetry reads the settings from the environment.

    Args:
        prints: write spans to standard output in place of sending them to a collector.
    """
    defaults = {"service.name": "moecast", "service.version": version}
    named = OTELResourceDetector().detect().attributes
    provider = TracerProvider(
        resource=Resource.create({**defaults, **named}), shutdown_on_exit=False
    )
    exporter = ConsoleSpanExporter() if prints else OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Tracing:
    """Traces the requests of one server."""

    def __init__(self, provider: TracerProvider):
        self._provider = provider

    def telemetry(self) -> TelemetryConfig:
        """FastAPI's settings, which make it create the spans of HTTP requests for answers."""
        return {
            **NO_TELEMETRY,
            "tracing": True,
            "tracer_provider": self._provider,
            "exclude": lambda scope: plain_path(scope) not in OPERATIONS,
        }

    def install(self, service: GenerationService, app: FastAPI, *, model_name: str) -> None:
        """Add the spans of the service's answers to those of the application's requests."""
        app.add_middleware(TraceContextMiddleware)
        tracer = self._provider.get_tracer("moecast")
        service.add_observer(AnswerTracer(service, tracer, model_name=model_name))

    def close(self) -> None:
        """Send the last spans."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


class TraceContextMiddleware:
    """Names a request's operation to its answers, and its trace in the log."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = plain_path(scope) if scope["type"] == "http" else ""
        if path not in OPERATIONS:
            await self._app(scope, receive, send)
            return
        trace_id = trace.get_current_span().get_span_context().trace_id
        scope["state"]["log"]["trace_id"] = trace.format_trace_id(trace_id)
        # The service's observers are called in this context.
        token = context.attach(context.set_value(OPERATION, OPERATIONS[path]))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)


@dataclass
class _TracedAnswer:
    span: Span
    offset_ns: int
    """Added to `time.monotonic`, by which a choice has its times, it is the system's clock."""
    phase: Span
    """The open one of `queue`, `prefill` and `decode`."""
    is_decoding: bool = False
    num_steps: int = 0
    """Forward passes in this phase."""
    stall_seconds: float = 0.0
    """Time in this phase that computation waited for transfers."""

    def to_ns(self, seconds: float) -> int:
        return self.offset_ns + int(seconds * 1e9)


class AnswerTracer(ServiceObserver):
    """Makes the spans of each answer.

    Args:
        service: its engine's stalls are read after each step.
    """

    def __init__(self, service: GenerationService, tracer: Tracer, *, model_name: str):
        self._service, self._tracer, self._model_name = service, tracer, model_name
        self._answers: dict[CompletionChoice, _TracedAnswer] = {}
        self._stall_seconds = 0.0

    def on_queued(self, choice: CompletionChoice) -> None:
        operation = str(context.get_value(OPERATION))
        offset_ns = time.time_ns() - time.monotonic_ns()
        arrived_ns = offset_ns + int(choice.arrived_at * 1e9)
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            attributes=request_attributes(choice, operation, self._model_name),
            start_time=arrived_ns,
        )
        self._answers[choice] = _TracedAnswer(
            span, offset_ns, self._start_phase("queue", span, arrived_ns)
        )

    def on_started(self, choice: CompletionChoice) -> None:
        assert choice.started_at is not None
        self._next_phase(self._answers[choice], "prefill", choice.started_at)

    def on_step(self, seconds: float, choices: list[CompletionChoice]) -> None:
        stall = self._read_stall()
        now = time.monotonic()
        for choice in choices:
            answer = self._answers.get(choice)
            if answer is None:
                continue  # the service was closed during the step
            answer.num_steps += 1
            answer.stall_seconds += stall
            if stall >= STALL_SECONDS:
                answer.phase.add_event(
                    "stall",
                    {
                        "moecast.stall_seconds": stall,
                        "moecast.step_seconds": seconds,
                        "moecast.num_sequences": len(choices),
                        "moecast.num_tokens": choice.num_tokens,
                    },
                    # Its token comes before the end of the step, and a prefill ends with it.
                    answer.to_ns(choice.last_token_at or now),
                )
            if choice.first_token_at is not None and not answer.is_decoding:
                self._next_phase(answer, "decode", choice.first_token_at)
                answer.is_decoding = True

    def on_ended(self, choice: CompletionChoice) -> None:
        assert choice.ended_at is not None
        answer = self._answers.pop(choice)
        ended_ns = answer.to_ns(choice.ended_at)
        self._end_phase(answer, ended_ns)
        answer.span.set_attributes(response_attributes(choice, self._model_name))
        if choice.finish_reason is FinishReason.ERROR:
            answer.span.set_status(StatusCode.ERROR)
        answer.span.end(ended_ns)

    def _read_stall(self) -> float:
        """Return the time that the last step waited for transfers."""
        assert self._service.loaded is not None
        total = self._service.loaded.model.moecast.engine.loop.stall_seconds
        stall, self._stall_seconds = total - self._stall_seconds, total
        return stall

    def _start_phase(self, name: str, parent: Span, start_ns: int) -> Span:
        return self._tracer.start_span(name, trace.set_span_in_context(parent), start_time=start_ns)

    def _next_phase(self, answer: _TracedAnswer, name: str, at_seconds: float) -> None:
        at_ns = answer.to_ns(at_seconds)
        self._end_phase(answer, at_ns)
        answer.phase = self._start_phase(name, answer.span, at_ns)
        answer.num_steps, answer.stall_seconds = 0, 0.0

    def _end_phase(self, answer: _TracedAnswer, at_ns: int) -> None:
        if answer.num_steps:
            answer.phase.set_attribute("moecast.num_steps", answer.num_steps)
            answer.phase.set_attribute("moecast.stall_seconds", answer.stall_seconds)
        answer.phase.end(at_ns)


def request_attributes(
    choice: CompletionChoice, operation: str, model_name: str
) -> Mapping[str, Any]:
    """Options of an answer, by the names of OpenTelemetry's conventions for generative AI."""
    sampling = choice.sampling
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "moecast",
        "gen_ai.request.model": model_name,
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": sampling.seed,
        "moecast.request_id": choice.request_id,
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    return attributes


def response_attributes(choice: CompletionChoice, model_name: str) -> Mapping[str, Any]:
    """Usage and end of an answer, by the same conventions."""
    attributes: dict[str, Any] = {
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": [str(choice.finish_reason)],
        "gen_ai.usage.input_tokens": len(choice.prompt),
        "gen_ai.usage.output_tokens": choice.num_tokens,
    }
    if choice.error_code is not None:
        attributes["error.type"] = choice.error_code
    return attributes
