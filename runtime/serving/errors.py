"""Errors of the HTTP API, one class for each code, in OpenAI's shape and in Anthropic's."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from predictors.errors import MoecastError

KINDS = {
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    408: ("invalid_request_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("service_unavailable_error", "overloaded_error"),
}
"""OpenAI's and Anthropic's `type` of an error, by its status."""
INVALID = ("invalid_request_error", "invalid_request_error")
MESSAGES_PATH = "/v1/messages"
"""Paths that begin so are Anthropic's."""


class RequestError(MoecastError):
    """A request that cannot be answered; by default because it is invalid.

    Args:
        param: the field of the request that is at fault.
        status: of HTTP, in place of the class's.
    """

    status = 400
    code: ClassVar[str | None] = None
    retry_after_seconds: ClassVar[int | None] = None
    """Value of the Retry-After header; None: trying again does not help."""

    def __init__(self, message: str, *, param: str | None = None, status: int | None = None):
        super().__init__(message)
        self.param = param
        if status is not None:
            self.status = status

    @property
    def kind(self) -> str:
        return KINDS.get(self.status, INVALID)[0]

    def body(self) -> dict[str, Any]:
        """OpenAI's error object, the body of every response with status 400 and above."""
        fields = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def anthropic_body(self) -> dict[str, Any]:
        """Anthropic's error object."""
        kind = KINDS.get(self.status, INVALID)[1]
        return {"type": "error", "error": {"type": kind, "message": str(self)}}


class ErrorAnswer(JSONResponse):
    """OpenAI's error object; on Anthropic's paths, Anthropic's."""

    def __init__(self, error: RequestError, headers: Mapping[str, str] = MappingProxyType({})):
        seconds = error.retry_after_seconds
        retry = {} if seconds is None else {"retry-after": str(seconds)}
        super().__init__(error.body(), error.status, {**headers, **retry})
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(MESSAGES_PATH):
            self.body = self.render(self._error.anthropic_body())
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


class ContextTooLong(RequestError):
    code = "context_length_exceeded"


class InvalidKey(RequestError):
    status = 401
    code = "invalid_api_key"


class UnknownModel(RequestError):
    status = 404
    code = "model_not_found"


class QueueFull(RequestError):
    status = 429
    code = "queue_full"
    retry_after_seconds = 1


class Unavailable(RequestError):
    status = 503


class ServerBusy(Unavailable):
    """Other requests take the memory that this one needs."""

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


class GenerationFailed(ServerFault):
    """The generation of this request failed; the others continue."""

    code = "generation_failed"


class ExpertsUnreadable(GenerationFailed):
    """The bytes of an expert did not arrive."""

    code = "expert_transfer_failed"
