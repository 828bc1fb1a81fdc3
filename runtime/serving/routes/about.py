"""What the server is and whether it works."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from predictors.versions import package_versions
from runtime.serving.errors import EngineDead, NotReady, UnknownModel
from runtime.serving.facts import Facts
from runtime.serving.service import Service, State


def facts_now(service: Service) -> Facts:
    """Of the served model.

    Raises:
        NotReady: it is loading.
        EngineDead: it could not be loaded.
    """
    if service.served is not None:
        return service.served.facts
    if service.state is State.FAILED:
        raise EngineDead(f"the model could not be loaded: {service.error}")
    raise NotReady("the model is loading; ask again when /ready answers 200")


def routes(service: Service, own_version: str) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> JSONResponse:
        """Whether the process and its engine thread live."""
        return JSONResponse({"status": str(service.state)}, 200 if service.is_alive else 503)

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """Whether requests are taken: the model is loaded, the server does not end."""
        is_ready = service.is_alive and service.state is State.READY
        return JSONResponse({"status": str(service.state)}, 200 if is_ready else 503)

    @router.get("/version")
    async def versions() -> dict[str, str | None]:
        return {"version": own_version, **package_versions(("transformers", "torch"))}

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card(facts_now(service))]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        facts = facts_now(service)
        if not facts.knows(name):
            raise UnknownModel(f"the model {name!r:.200} is not served here; {facts.name!r} is")
        return model_card(facts)

    return router


def model_card(facts: Facts) -> dict[str, Any]:
    return {
        "id": facts.name,
        "object": "model",
        "created": facts.created,
        "owned_by": "moecast",
        "max_model_len": facts.longest,
        "chat_template": "the model's" if facts.has_template else "none: turns as plain text",
    }
