"""Text to tokens and back."""

import asyncio
from typing import Any

from fastapi import APIRouter

from runtime.serving.orders import detokenized, require_model, require_tokens, tokens_of
from runtime.serving.routes.about import facts_now
from runtime.serving.schemas import DetokenizeRequest, TokenizeRequest
from runtime.serving.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        facts = facts_now(service)
        tokens = await asyncio.to_thread(tokens_of, request, facts)
        return {"count": len(tokens), "max_model_len": facts.longest, "tokens": tokens}

    @router.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> dict[str, str]:
        facts = facts_now(service)
        require_model(request.model, facts)
        require_tokens(request.tokens, facts, param="tokens")
        return {"prompt": await asyncio.to_thread(detokenized, request.tokens, facts)}

    return router
