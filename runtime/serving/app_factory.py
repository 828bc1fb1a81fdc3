"""Creates a server's service and application from its configuration."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from runtime.engine.memory import freeze_objects, return_free_heap
from runtime.policy.budget import parse_size
from runtime.serving.app import NO_TELEMETRY, AppSettings, create_app
from runtime.serving.choice import CompletionChoice
from runtime.serving.config import ServeConfig
from runtime.serving.generation_requests import RequestLimits
from runtime.serving.middleware import RequestLogMiddleware
from runtime.serving.model_loading import LoadedModel, load_model
from runtime.serving.recording import PromptRecorder
from runtime.serving.routes import metrics_routes, status_routes
from runtime.serving.service import GenerationService, ServiceObserver
from runtime.serving.telemetry import Telemetry

if TYPE_CHECKING:
    from runtime.serving.tracing import Tracing


def create_server(
    config: ServeConfig,
    *,
    keys: frozenset[str],
    version: str,
    tracing: "Tracing | None" = None,
    recorder: PromptRecorder | None = None,
) -> tuple[GenerationService, ASGIApp]:
    """Create a service that has not been started, and its application.

    Args:
        keys: the API keys; none disables authentication.
        tracing: records the requests; the caller closes it.
        recorder: records prompts.

    Raises:
        MoecastError: an invalid size.
    """

    def load_permanently() -> LoadedModel:
        loaded = load_model(config)
        freeze_objects()
        return loaded

    service = GenerationService(
        load_permanently,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        observers=[HeapTrimmer()] if recorder is None else [HeapTrimmer(), recorder],
    )
    telemetry = Telemetry(service, config, version=version, recorder=recorder)
    settings = AppSettings(
        version=version,
        keys=keys,
        checks_host=config.is_local and not keys and not config.insecure,
        max_body_bytes=parse_size(config.max_body, name="max_body"),
        limits=RequestLimits(
            max_new_tokens=config.max_new_tokens,
            max_choices=config.max_choices,
            max_stop=config.max_stop,
            max_total_choices=config.max_running + config.max_waiting,
        ),
        log_prompts=config.log_prompts,
        telemetry=NO_TELEMETRY if tracing is None else tracing.telemetry(),
    )
    routers = [metrics_routes(telemetry.metrics), status_routes(telemetry.status)]
    app = create_app(service, settings, routers=routers)
    if tracing is not None:
        tracing.install(service, app, model_name=config.model.name)
    return service, RequestLogMiddleware(app)


TRIM_INTERVAL_SECONDS = 30.0
"""Long enough that the milliseconds of one trim do not matter."""


class HeapTrimmer(ServiceObserver):
    """Trims the heap when the server becomes idle, and at intervals between two steps.

    When the server is idle, everything that its last answers needed has been freed.
    """

    def __init__(
        self,
        *,
        interval_seconds: float = TRIM_INTERVAL_SECONDS,
        trim: Callable[[], None] = return_free_heap,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._interval, self._trim_heap, self._clock = interval_seconds, trim, clock
        self._last_trim = clock()

    def on_step(self, seconds: float, choices: list[CompletionChoice]) -> None:  # noqa: ARG002
        if self._clock() - self._last_trim >= self._interval:
            self._trim()

    def on_idle(self) -> None:
        self._trim()

    def _trim(self) -> None:
        self._trim_heap()
        self._last_trim = self._clock()
