"""OpenTelemetry's variables turn traces on, and none does so by default."""

import sys

import pytest

from predictors.errors import MoecastError
from runtime.serving.tracing_settings import choose_exporter, open_tracing

COLLECTOR = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.mark.parametrize(
    ("environment", "exporter"),
    [
        ({}, "none"),
        ({"OTEL_SERVICE_NAME": "mine", "OTEL_EXPORTER_OTLP_ENDPOINT": ""}, "none"),
        (COLLECTOR, "otlp"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "otlp"),
        (COLLECTOR | {"OTEL_TRACES_EXPORTER": "none"}, "none"),
        (COLLECTOR | {"OTEL_SDK_DISABLED": "true"}, "none"),
        (COLLECTOR | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
        ({"OTEL_TRACES_EXPORTER": "zipkin", "OTEL_SDK_DISABLED": "TRUE"}, "none"),
    ],
)
def test_exporter__is_chosen_by_the_standard_variables(
    environment: dict[str, str], exporter: str
) -> None:
    assert choose_exporter(environment) == exporter


def test_variables__that_ask_for_the_unsupported_are_refused() -> None:
    with pytest.raises(MoecastError, match="unknown OTEL_TRACES_EXPORTER 'zipkin'.*otlp"):
        choose_exporter({"OTEL_TRACES_EXPORTER": "zipkin"})
    with pytest.raises(MoecastError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL=grpc.*4318"):
        choose_exporter(COLLECTOR | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_tracing__without_a_variable_or_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "runtime.serving.tracing", raising=False)
    assert open_tracing({}, version="1") is None
    with pytest.raises(MoecastError, match=r"pip install 'moecast\[tracing\]'"):
        open_tracing(COLLECTOR, version="1")
