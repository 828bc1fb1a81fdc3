"""The HTTP application around one service: routes, error handlers, middleware, telemetry."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from runtime.engine.memory import freeze_objects, return_free_heap
from runtime.policy.budget import parse_size
from runtime.serving.api import routes
from runtime.serving.api.body_fields import FieldError, describe_problem, field_path
from runtime.serving.api.schemas import ErrorResponse
from runtime.serving.choice import CompletionChoice
from runtime.serving.config import ServeConfig
from runtime.serving.edge.body_limit import BODY_SECONDS, BodyLimitMiddleware
from runtime.serving.edge.middleware import AccessMiddleware, ApiKeys, RequestLogMiddleware
from runtime.serving.errors import ErrorAnswer, RequestError
from runtime.serving.observe.recording import PromptRecorder
from runtime.serving.observe.status import Telemetry
from runtime.serving.served_model import LoadedModel, load_model
from runtime.serving.service import GenerationService, ServiceObserver

if TYPE_CHECKING:
    from runtime.serving.observe.tracing import Tracing


MAX_MESSAGE_LENGTH = 500
"""Characters of an error message that may quote the client's input."""
NO_TELEMETRY = TelemetryConfig(
    tracing=False, metrics=False, logs=False, operation_spans=False, auto_configure=False
)
"""FastAPI would otherwise use what another library has set up, and send errors with their texts."""


def create_app(
    service: GenerationService,
    config: ServeConfig,
    *,
    version: str = "",
    keys: frozenset[str] = frozenset(),
    tracing: "Tracing | None" = None,
    telemetry: Telemetry | None = None,
    body_seconds: float = BODY_SECONDS,
) -> FastAPI:
    """Create the application.

    Args:
        keys: API keys; none disables authentication. Then a server of this machine only, unless it
            is `insecure`, accepts this machine's own names in the Host header only.
        telemetry: adds the metrics and the status page.

    Raises:
        MoecastError: an invalid size.
    """
    app = FastAPI(
        title="moecast",
        version=version or "0",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry=NO_TELEMETRY if tracing is None else tracing.telemetry(),
        responses={
            "default": {"model": ErrorResponse, "description": "An error in OpenAI's shape"}
        },
    )
    routes.add_server_routes(app, service, version)
    routes.add_generation_routes(app, service, config)
    routes.add_token_routes(app, service)
    if telemetry is not None:
        routes.add_status_routes(app, telemetry.status, telemetry.metrics.render)
    app.add_exception_handler(RequestError, handle_request_error)
    app.add_exception_handler(RequestValidationError, handle_validation_error)
    app.add_exception_handler(HTTPException, http_errors(service))
    # The middleware that is added last is the outermost.
    max_bytes = parse_size(config.max_body, name="max_body")
    app.add_middleware(BodyLimitMiddleware, max_bytes=max_bytes, timeout_seconds=body_seconds)
    app.add_middleware(
        AccessMiddleware,
        checks_host=config.is_local and not keys and not config.insecure,
        keys=ApiKeys(keys) if keys else None,
    )
    if tracing is not None:
        tracing.install(service, app, model_name=config.model.name)
    app.add_middleware(RequestLogMiddleware)
    return app


# Coroutines, as Starlette would call functions in a thread, which imports modules when the first
# error may come from a lack of descriptors.
async def handle_request_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    return ErrorAnswer(error)


async def handle_validation_error(_request: Request, error: Exception) -> JSONResponse:
    """Answer with the first invalid field, by its path."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    location: tuple[int | str, ...] = first["loc"][1:]
    problem = describe_problem(first)
    if first["type"] == "json_invalid":
        problem = f"{problem} (character {location[0]})"
        location = ()
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError) and cause.field:
        location += (cause.field,)
    path = field_path(location)
    message = escape_message(f"{path or 'the body'}: {problem}")
    return ErrorAnswer(RequestError(message, param=escape_message(path) or None))


def escape_message(text: str) -> str:
    """ASCII of limited length: the text may quote anything that the client sent."""
    return text[:MAX_MESSAGE_LENGTH].encode("ascii", "backslashreplace").decode()


def http_errors(service: GenerationService) -> Callable[[Request, Exception], Any]:
    """The handler of Starlette's own errors: unknown path, wrong method, unreadable body.

    The first two name what there is instead.
    """

    async def handle(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        problem, loaded = str(error.detail), service.loaded
        if error.__cause__ is not None:
            problem += f": {error.__cause__}"
        if error.status_code in (404, 405):
            model = f", with the model {loaded.info.name!r}" if loaded is not None else ""
            problem = (
                f"{request.method} {request.url.path}: {problem}; this server has POST "
                "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and GET "
                f"/v1/models{model}"
            )
        failure = RequestError(escape_message(problem), status=error.status_code)
        return ErrorAnswer(failure, error.headers or {})

    return handle


def create_server(
    config: ServeConfig,
    *,
    keys: frozenset[str],
    version: str,
    tracing: "Tracing | None" = None,
    recorder: PromptRecorder | None = None,
) -> tuple[GenerationService, ASGIApp]:
    """Create a service that has not been started, and its application.

    Args:
        keys: the API keys; none disables authentication.
        tracing: records the requests; the caller closes it.
        recorder: records prompts.

    Raises:
        MoecastError: an invalid size.
    """

    def load_permanently() -> LoadedModel:
        loaded = load_model(config)
        freeze_objects()
        return loaded

    service = GenerationService(
        load_permanently,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        observers=[HeapTrimmer()] if recorder is None else [HeapTrimmer(), recorder],
    )
    telemetry = Telemetry(service, config, version=version, recorder=recorder)
    app = create_app(
        service, config, version=version, keys=keys, tracing=tracing, telemetry=telemetry
    )
    return service, app


TRIM_INTERVAL_SECONDS = 30.0
"""Long enough that the milliseconds of one trim do not matter."""


class HeapTrimmer(ServiceObserver):
    """Trims the heap when the server becomes idle, and at intervals between two steps.

    When the server is idle, everything that its last answers needed has been freed.
    """

    def __init__(self) -> None:
        self._last_trim = time.monotonic()

    def on_step(self, seconds: float, choices: list[CompletionChoice]) -> None:  # noqa: ARG002
        if time.monotonic() - self._last_trim >= TRIM_INTERVAL_SECONDS:
            self._trim()

    def on_idle(self) -> None:
        self._trim()

    def _trim(self) -> None:
        return_free_heap()
        self._last_trim = time.monotonic()
