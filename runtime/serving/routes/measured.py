"""What Prometheus scrapes."""

from fastapi import APIRouter
from starlette.responses import Response

from runtime.serving.metrics import Metrics


def routes(metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    def scrape() -> Response:
        body, kind = metrics.render()
        return Response(body, headers={"Content-Type": kind})

    return router
