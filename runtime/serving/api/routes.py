"""Routes of the HTTP API: server, models, generation, tokens, metrics, status page."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from predictors.origin import package_versions
from runtime.serving.api.event_stream import EventStreamResponse, cancel_on_disconnect
from runtime.serving.api.generation_requests import (
    GenerationRequest,
    decode_tokens,
    parse_chat,
    parse_completion,
    require_length,
    require_model,
    require_tokens,
    tokenize_body,
)
from runtime.serving.api.messages_api import MessagesRequest, MessagesResponse, PromptBody
from runtime.serving.api.output_stream import ClientDisconnected, OutputStream
from runtime.serving.api.responses import (
    ChatResponse,
    CompletionResponse,
    ResponseBuilder,
    to_json,
    write_json,
)
from runtime.serving.api.responses_api import ResponsesRequest, ResponsesResponse
from runtime.serving.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationBody,
    TokenizeRequest,
)
from runtime.serving.api.translation import TranslatedBody, count_tokens, parse_translated
from runtime.serving.config import ServeConfig
from runtime.serving.errors import EngineDead, NotReady
from runtime.serving.served_model import ModelInfo
from runtime.serving.service import GenerationService, ServiceState

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected; it appears in the log only."""

PAGE_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The page loads nothing from other hosts, makes no markup of texts, and no page may embed it."""

Body = TypeVar("Body", bound=GenerationBody | TranslatedBody)


def require_model_info(service: GenerationService) -> ModelInfo:
    """Properties of the served model.

    Raises:
        NotReady: the model is loading.
        EngineDead: the model could not be loaded.
    """
    if service.loaded is not None:
        return service.loaded.info
    if service.state is ServiceState.FAILED:
        raise EngineDead(f"the model could not be loaded: {service.error}")
    raise NotReady("the model is loading; try again when /ready answers 200")


def add_server_routes(app: FastAPI, service: GenerationService, version: str) -> None:
    versions = {"version": version, **package_versions(("transformers", "torch"))}

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether the process and its engine thread are alive."""
        return JSONResponse({"status": str(service.state)}, 200 if service.is_alive else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether requests are accepted: the model is loaded, the server not shutting down."""
        is_ready = service.is_alive and service.state is ServiceState.READY
        return JSONResponse({"status": str(service.state)}, 200 if is_ready else 503)

    @app.get("/version")
    async def version_numbers() -> dict[str, str | None]:
        return versions

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        info = require_model_info(service)
        return {
            "object": "list",
            "data": [model_card(info, name) for name in (info.name, *info.listed_names)],
        }

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        info = require_model_info(service)
        require_model(name, info, param=None)
        return model_card(info, name)


def model_card(info: ModelInfo, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "moecast",
        "max_model_len": info.max_length,
        "chat_template": "the model's" if info.has_template else "none: turns as plain text",
    }


def add_generation_routes(app: FastAPI, service: GenerationService, config: ServeConfig) -> None:
    async def respond(
        body: Body,
        http: Request,
        parse: Callable[[Body, ModelInfo, ServeConfig], GenerationRequest],
        response_class: type[ResponseBuilder],
        prefix: str,
    ) -> Response:
        # A full queue rejects the request before any work is done for it.
        service.require_capacity()
        info = require_model_info(service)
        request = await asyncio.to_thread(parse, body, info, config)
        http.state.parse_turn.release()
        request_id, log_fields = http.state.request_id, http.state.log
        stream = OutputStream(service, request, request_id=request_id)
        response = response_class(stream, info, body, id=prefix + request_id)
        if config.log_prompts:
            log_fields["prompts"] = await asyncio.to_thread(decode_prompts, request, info)
        stream.submit()
        if body.stream:
            return EventStreamResponse(
                response, log_fields=log_fields, logs_answers=config.log_prompts
            )
        async with cancel_on_disconnect(stream, http.receive, log_fields):
            try:
                whole = await response.whole()
            except ClientDisconnected:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
        if config.log_prompts:
            log_fields["answers"] = [
                {name: value for name, value in choice.items() if name != "logprobs"}
                for choice in whole[response.answers]
            ]
        if request.num_logprobs:
            # It may take seconds, during which the event loop would answer nobody.
            content = await asyncio.to_thread(write_json, whole)
        else:
            content = to_json(whole).encode()
        return Response(content, media_type="application/json")

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Any:
        """Continue a text."""
        return await respond(body, http, parse_completion, CompletionResponse, "cmpl-")

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, http: Request) -> Any:
        """Answer a conversation."""
        return await respond(body, http, parse_chat, ChatResponse, "chatcmpl-")

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, http: Request) -> Any:
        """Answer a conversation; OpenAI's newer API."""
        return await respond(body, http, parse_translated, ResponsesResponse, "resp_")

    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, http: Request) -> Any:
        """Answer a conversation; Anthropic's API."""
        return await respond(body, http, parse_translated, MessagesResponse, "msg_")


def decode_prompts(request: GenerationRequest, info: ModelInfo) -> list[str]:
    return [decode_tokens(prompt.tokens, info) for prompt in request.prompts]


def add_token_routes(app: FastAPI, service: GenerationService) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        info = require_model_info(service)

        def respond() -> bytes:
            tokens = tokenize_body(body, info)
            answer = {"count": len(tokens), "max_model_len": info.max_length, "tokens": tokens}
            return to_json(answer).encode()

        return Response(await asyncio.to_thread(respond), media_type="application/json")

    @app.post("/v1/messages/count_tokens")
    async def count(body: PromptBody) -> dict[str, int]:
        info = require_model_info(service)
        return {"input_tokens": await asyncio.to_thread(count_tokens, body, info)}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        info = require_model_info(service)
        require_model(body.model, info)
        require_tokens(body.tokens, info, param="tokens")
        require_length(body.tokens, info, param="tokens")
        return {"prompt": await asyncio.to_thread(decode_tokens, body.tokens, info)}


def add_status_routes(
    app: FastAPI, status: Callable[[], dict[str, Any]], metrics: Callable[[], tuple[bytes, str]]
) -> None:
    """Add the status page at `/`, `/status`, which it polls every second, and `/metrics`.

    Args:
        status: content of `/status`; called in a worker thread.
        metrics: content of `/metrics`, and its type; as `status`.
    """

    @app.get("/metrics")
    async def scrape() -> Response:
        content, content_type = await asyncio.to_thread(metrics)
        return Response(content, headers={"Content-Type": content_type})

    @app.get("/status")
    async def status_now() -> dict[str, Any]:
        """Totals since the start, and the current state."""
        return await asyncio.to_thread(status)

    def add_file(path: str, name: str, content_type: str) -> None:
        content = Path(__file__).with_name(name).read_bytes()

        @app.get(path, include_in_schema=False)
        async def respond() -> Response:
            return Response(content, headers={**PAGE_HEADERS, "Content-Type": content_type})

    for path, (name, content_type) in PAGE_FILES.items():
        add_file(path, name, content_type)
