"""Completions and chats, whole or as they are made."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from runtime.serving.answers import Answer, ChatAnswer, CompletionAnswer
from runtime.serving.facts import Facts
from runtime.serving.mailbox import ClientGone, Mailbox
from runtime.serving.orders import Limits, Order, chat_order, completion_order
from runtime.serving.replies import Envelope
from runtime.serving.routes.about import facts_now
from runtime.serving.schemas import ChatRequest, CompletionRequest, Sampled
from runtime.serving.service import Service
from runtime.serving.streams import AnswerStream, as_json, watched

GONE = 499
"""Nobody reads it; the log's line says so (nginx's number for it)."""

Asked = TypeVar("Asked", bound=Sampled)


def routes(service: Service, limits: Limits, *, log_prompts: bool) -> APIRouter:
    router = APIRouter()

    async def answer(
        asked: Asked,
        request: Request,
        read: Callable[[Asked, Facts, Limits], Order],
        make: type[Answer],
        prefix: str,
    ) -> Response:
        # A full queue says so before any work is done for the request.
        service.require_room()
        facts = facts_now(service)
        order = await asyncio.to_thread(read, asked, facts, limits)
        request_id = request.state.request_id
        mailbox = Mailbox(service, order, request_id=request_id)
        envelope = Envelope(id=f"{prefix}-{request_id}", model=facts.name)
        made = make(mailbox, facts, envelope)
        fields = request.state.log
        if log_prompts:
            fields["prompts"] = [facts.tokenizer.decode(prompt.tokens) for prompt in order.prompts]
        mailbox.submit()
        if asked.stream:
            return AnswerStream(made, with_usage=asked.includes_usage, fields=fields)
        async with watched(mailbox, request.receive, fields):
            try:
                whole = await made.whole()
            except ClientGone:
                return Response(status_code=GONE)
        if log_prompts:
            fields["answers"] = whole["choices"]
        return Response(as_json(whole), media_type="application/json")

    @router.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Any:
        """Goes on with a text."""
        return await answer(asked, request, completion_order, CompletionAnswer, "cmpl")

    @router.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request) -> Any:
        """Answers a conversation."""
        return await answer(asked, request, chat_order, ChatAnswer, "chatcmpl")

    return router
