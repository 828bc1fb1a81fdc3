"""Errors of the HTTP API, one class for each cause, in OpenAI's shape and in Anthropic's."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from predictors.errors import MoecastError


class RequestError(MoecastError):
    """A request that cannot be answered; by default because it is invalid.

    Args:
        param: the field of the request that is at fault.
    """

    status: ClassVar[int] = 400
    kind: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = None
    retry_after_seconds: ClassVar[int | None] = None
    """Value of the Retry-After header; None: trying again does not help."""
    headers: ClassVar[Mapping[str, str]] = {}
    """More headers of the response."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param

    def body(self) -> dict[str, Any]:
        return error_body(str(self), kind=self.kind, param=self.param, code=self.code)


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object, the body of every response with status 400 and above."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


MESSAGES_PATH = "/v1/messages"
"""Paths that begin so are Anthropic's."""
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error_body(message: str, status: int) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class ErrorAnswer(JSONResponse):
    """OpenAI's error object; on Anthropic's paths, Anthropic's."""

    def __init__(self, body: dict[str, Any], status: int, headers: Mapping[str, str]):
        super().__init__(body, status, headers)
        self._message = body["error"]["message"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(MESSAGES_PATH):
            self.body = self.render(anthropic_error_body(self._message, self.status_code))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(error: RequestError) -> ErrorAnswer:
    seconds = error.retry_after_seconds
    retry = {} if seconds is None else {"retry-after": str(seconds)}
    return ErrorAnswer(error.body(), error.status, {**error.headers, **retry})


class ContextTooLong(RequestError):
    code = "context_length_exceeded"


class NotJson(RequestError):
    status = 415


class BodyTooLarge(RequestError):
    status = 413


class BodyTooSlow(RequestError):
    status = 408


class InvalidKey(RequestError):
    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"
    headers: ClassVar = {"www-authenticate": 'Basic realm="moecast", charset="UTF-8"'}


class ForbiddenHost(RequestError):
    status = 403
    kind = "permission_error"


class UnknownModel(RequestError):
    status = 404
    code = "model_not_found"


class QueueFull(RequestError):
    status = 429
    kind = "rate_limit_error"
    code = "queue_full"
    retry_after_seconds = 1


class Unavailable(RequestError):
    status = 503
    kind = "service_unavailable_error"


class ServerBusy(Unavailable):
    """Other requests take the memory that this one needs before it can be checked."""

    code = "overloaded"
    retry_after_seconds = 1


class NotReady(Unavailable):
    """The model is loading."""

    code = "loading"
    retry_after_seconds = 5


class Draining(Unavailable):
    """The server is shutting down and accepts no new requests."""

    code = "shutting_down"
    retry_after_seconds = 5


class EngineDead(Unavailable):
    code = "engine_dead"


class ServerFault(RequestError):
    """A fault of this program."""

    status = 500
    kind = "server_error"


class GenerationFailed(ServerFault):
    """The generation of this request failed; the others continue."""

    code = "generation_failed"


class ExpertsUnreadable(GenerationFailed):
    """The bytes of an expert did not arrive."""

    code = "expert_transfer_failed"
