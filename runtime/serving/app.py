"""The HTTP application: routes around one service."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from runtime.errors import ChatError
from runtime.serving.errors import RequestError, error_body
from runtime.serving.gate import BODY_SECONDS, BodyLimit, HostCheck, KeyCheck, RequestLog
from runtime.serving.keys import Keys
from runtime.serving.orders import Limits
from runtime.serving.routes import about, generation, tokens
from runtime.serving.schemas import ErrorReply
from runtime.serving.service import Service

MESSAGE_LENGTH = 500
"""Characters of an error that may quote what the client sent."""
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the application is told about the world around it."""

    version: str = ""
    keys: frozenset[str] = frozenset()
    """What clients must show one of; none: they need no key."""
    checks_host: bool = False
    """Answer only where this machine's own names are asked for."""
    max_body_bytes: int = 1 << 20
    body_seconds: float = BODY_SECONDS
    limits: Limits = field(default_factory=Limits)
    log_prompts: bool = False


def build_app(
    service: Service,
    settings: Settings,
    *,
    routers: Iterable[APIRouter] = (),
) -> FastAPI:
    """Build the application with the routes of OpenAI's API.

    Args:
        routers: more routes, such as metrics and the status page.
    """
    app = FastAPI(
        title="moecast",
        version=settings.version or "0",
        docs_url=None,
        redoc_url=None,
        responses={"default": {"model": ErrorReply, "description": "What is wrong, OpenAI's way"}},
    )
    app.include_router(about.routes(service, settings.version))
    app.include_router(
        generation.routes(service, settings.limits, log_prompts=settings.log_prompts)
    )
    app.include_router(tokens.routes(service))
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(RequestError, answer_refusal)
    app.add_exception_handler(ChatError, answer_chat_error)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(Exception, answer_failure)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, seconds=settings.body_seconds)
    if settings.keys:
        app.add_middleware(KeyCheck, keys=Keys(settings.keys))
    if settings.checks_host:
        app.add_middleware(HostCheck)
    return app


def logged(app: FastAPI) -> ASGIApp:
    """The application as it is served: around everything, Starlette's own last resort too, which
    answers in a shape of its own.
    """
    return RequestLog(app)


def answer_refusal(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    headers = {}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(error.retry_after_seconds)
    return JSONResponse(error.body(), error.status, headers)


def answer_failure(request: Request, _error: Exception) -> JSONResponse:
    """What nobody foresaw; it is raised again for the log."""
    message = f"the server failed; its log says more under request id {request.state.request_id}"
    return JSONResponse(error_body(message, kind="server_error"), 500)


def answer_chat_error(_request: Request, error: Exception) -> JSONResponse:
    return answer_refusal(_request, RequestError(str(error), param="messages"))


def answer_invalid(_request: Request, error: Exception) -> JSONResponse:
    """The first thing that is wrong, with the field in which it is."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return answer_refusal(_request, cause)
    return answer_refusal(_request, RequestError(said(first), param=field_of(first["loc"])))


def said(found: dict[str, object]) -> str:
    where = field_of(found["loc"])
    what = str(found["msg"])
    if found["type"] == "extra_forbidden":
        what = "this server does not know it"
    elif found["type"] == "json_invalid":
        where, what = None, f"the body is not JSON: {what}"
    return ascii_only(f"{where}: {what}" if where else what)


def field_of(location: object) -> str | None:
    """The request's own field of an error's location."""
    assert isinstance(location, Sequence)
    names = [one for one in location[1:] if isinstance(one, str)]
    return ascii_only(names[0]) if names else None


def ascii_only(text: str) -> str:
    """What may hold anything that a client sent, so that it can always be written."""
    return text[:MESSAGE_LENGTH].encode("ascii", "backslashreplace").decode()


def answer_http(_request: Request, error: Exception) -> JSONResponse:
    """Starlette's own refusals: no such path, no such method, a body that can not be read."""
    assert isinstance(error, HTTPException)
    kind = KINDS.get(error.status_code, "invalid_request_error")
    if error.status_code >= 500:
        kind = "server_error"
    body = error_body(ascii_only(str(error.detail)), kind=kind)
    return JSONResponse(body, error.status_code, dict(error.headers or {}))
