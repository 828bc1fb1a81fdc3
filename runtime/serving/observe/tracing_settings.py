"""Decides by OpenTelemetry's environment variables whether requests are traced."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from predictors.errors import MoecastError, unknown

if TYPE_CHECKING:
    from runtime.serving.observe.tracing import Tracing

EXPORTER = "OTEL_TRACES_EXPORTER"
DISABLED = "OTEL_SDK_DISABLED"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP, CONSOLE, NONE = "otlp", "console", "none"
HTTP = "http/protobuf"


def choose_exporter(environment: Mapping[str, str]) -> str:
    """Return `otlp`, `console` or `none`.

    OpenTelemetry's default is to send to a collector on this machine; here traces are sent only if
    a variable names an exporter or an endpoint.

    Raises:
        MoecastError: a variable asks for what is not supported.
    """
    if environment.get(DISABLED, "").strip().lower() == "true":
        return NONE
    exporter = environment.get(EXPORTER, "").strip().lower()
    if not exporter:
        exporter = OTLP if any(map(environment.get, ENDPOINTS)) else NONE
    if exporter not in (OTLP, CONSOLE, NONE):
        raise MoecastError(unknown(EXPORTER, exporter, (OTLP, CONSOLE, NONE)))
    if exporter == OTLP:
        for name in PROTOCOLS:
            if (protocol := environment.get(name, "").strip()) not in ("", HTTP):
                raise MoecastError(
                    f"{name}={protocol}: traces are sent by {HTTP} only, for which collectors "
                    f"listen on port 4318; set {name}={HTTP}, or {DISABLED}=true for no traces"
                )
    return exporter


def open_tracing(environment: Mapping[str, str], *, version: str) -> "Tracing | None":
    """Return what traces a server's requests; None if no variable asks for it.

    Raises:
        MoecastError: a variable asks for what is not supported, or the extra is not installed.
    """
    exporter = choose_exporter(environment)
    if exporter == NONE:
        return None
    try:
        # Imported here: it needs the extra, and takes time that servers without traces save.
        from runtime.serving.observe.tracing import Tracing, make_provider
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "opentelemetry":
            raise
        raise MoecastError(
            "OTEL_... variables ask for traces, which need OpenTelemetry: "
            f"pip install 'moecast[tracing]', or set {DISABLED}=true to serve without them"
        ) from error
    return Tracing(make_provider(version, prints=exporter == CONSOLE))
