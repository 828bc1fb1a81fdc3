"""The status page at `/`, and `/status`, which it asks each second."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

FOLDER = Path(__file__).parents[1]
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Nothing is loaded from elsewhere, and no other page may show this one."""


def routes(status: Callable[[], dict[str, Any]]) -> APIRouter:
    """Build the routes of the status page.

    Args:
        status: returns what the page shows; called in a worker thread.
    """
    router = APIRouter()

    @router.get("/status")
    def status_now() -> dict[str, Any]:
        """What the status page shows: sums since the start, and states of this moment."""
        return status()

    for path, (name, content_type) in FILES.items():
        answer = answer_with((FOLDER / name).read_bytes(), content_type)
        router.add_api_route(path, answer, include_in_schema=False)
    return router


def answer_with(content: bytes, content_type: str) -> Callable[[], Any]:
    """A route that always says the same."""

    async def answer() -> Response:
        return Response(content, headers={**HEADERS, "Content-Type": content_type})

    return answer
