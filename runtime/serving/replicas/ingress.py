"""The door: reads a request whole, forecasts what it will need, and hands it to a replica."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from predictors.spec import ModelSpec
from runtime.ray_cluster import keep_to_loopback
from runtime.serving.errors import QueueFull, RequestError, error_body
from runtime.serving.replicas.exchange import Wire
from runtime.serving.replicas.forecasting import Forecaster, forecaster_of


class Ingress:
    """Made by Ray, with a handle to the replicas.

    Args:
        engines: Ray's handle.
        is_alone: the cluster is this machine.
        name: the model's short name, as the zoo knows it.
        folder: of its tokenizer.
        kind: predictor that forecasts from tokens.
    """

    def __init__(
        self,
        engines: Any,
        *,
        name: str,
        folder: str,
        kind: str,
        max_body_bytes: int,
        is_alone: bool,
    ):
        if is_alone:
            keep_to_loopback()
        self._engines = engines
        self._name, self._folder, self._kind = name, Path(folder), kind
        self._max_body_bytes = max_body_bytes
        self._forecaster: Forecaster | None = None
        self._is_ready = False

    async def __call__(self, request: Request) -> Response:
        from ray.serve.exceptions import BackPressureError

        body = await self._body(request)
        if body is None:
            said = f"the body is larger than {self._max_body_bytes} bytes"
            return JSONResponse(error_body(said, kind="invalid_request_error"), 413)
        wire = Wire(
            method=request.method,
            path=request.url.path,
            query=request.scope["query_string"],
            headers=list(request.scope["headers"]),
            body=body,
            client=tuple(request.scope["client"]) if request.scope.get("client") else None,
        )
        mass = None
        if request.method == "POST":
            forecaster = await self._ready_forecaster()
            mass = None if forecaster is None else forecaster.mass(wire.path, body)
        try:
            messages = self._engines.options(stream=True).answer.remote(wire, mass)
            start = await anext(messages)
        except BackPressureError:
            return refused(QueueFull("every replica's queue is full; ask again later"))
        response = StreamingResponse(chunks(messages), start["status"])
        response.raw_headers = [(bytes(k), bytes(v)) for k, v in start.get("headers", [])]
        return response

    async def _body(self, request: Request) -> bytes | None:
        """None: larger than allowed."""
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_body_bytes:
                return None
            parts.append(part)
        return b"".join(parts)

    async def _ready_forecaster(self) -> Forecaster | None:
        if not self._is_ready:
            spec = ModelSpec(**await self._engines.spec.remote())
            self._forecaster = forecaster_of(
                spec, name=self._name, folder=self._folder, kind=self._kind
            )
            self._is_ready = True
        return self._forecaster


async def chunks(messages: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """The body, as it comes."""
    async for message in messages:
        if message["type"] == "http.response.body" and message.get("body"):
            yield message["body"]


def refused(error: RequestError) -> JSONResponse:
    headers = {}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(error.retry_after_seconds)
    return JSONResponse(error.body(), error.status, headers)
