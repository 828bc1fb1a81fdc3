"""What a client is told when a request can not be answered: OpenAI's shape, one class a cause."""

from typing import Any, ClassVar

from predictors.errors import MoecastError


class RequestError(MoecastError):
    """The request can not be answered as it is; by default because of what it asks for.

    Args:
        param: the field of the request that is at fault.
    """

    status: ClassVar[int] = 400
    kind: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = None
    retry_after_seconds: ClassVar[int | None] = None
    """Told to the client; none: asking again is of no use."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param

    def body(self) -> dict[str, Any]:
        return error_body(str(self), kind=self.kind, param=self.param, code=self.code)


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object, as every answer of 400 and above is."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ContextTooLong(RequestError):
    code = "context_length_exceeded"


class UnknownModel(RequestError):
    status = 404
    code = "model_not_found"


class QueueFull(RequestError):
    status = 429
    kind = "rate_limit_error"
    code = "queue_full"
    retry_after_seconds = 1


class NotReady(RequestError):
    """The model is loading."""

    status = 503
    kind = "service_unavailable_error"
    code = "loading"
    retry_after_seconds = 5


class Draining(RequestError):
    """The server ends and takes nothing new."""

    status = 503
    kind = "service_unavailable_error"
    code = "shutting_down"
    retry_after_seconds = 5


class EngineDead(RequestError):
    status = 503
    kind = "service_unavailable_error"
    code = "engine_dead"


class GenerationFailed(RequestError):
    """This request's generation ended in an error; the others went on."""

    status = 500
    kind = "server_error"
    code = "generation_failed"


class ExpertsUnreadable(GenerationFailed):
    """Bytes of an expert did not arrive."""

    code = "expert_transfer_failed"
