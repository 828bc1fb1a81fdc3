"""Creates a server's service and application from its configuration."""

from starlette.types import ASGIApp

from runtime.engine.memory import freeze_objects
from runtime.policy.budget import parse_size
from runtime.serving.app import AppSettings, create_app
from runtime.serving.config import ServeConfig
from runtime.serving.generation_requests import RequestLimits
from runtime.serving.heap_trim import HeapTrimmer
from runtime.serving.middleware import RequestLogMiddleware
from runtime.serving.model_loading import LoadedModel, load_model
from runtime.serving.routes import metrics_routes, status_routes
from runtime.serving.service import GenerationService
from runtime.serving.telemetry import Telemetry


def create_server(
    config: ServeConfig, *, keys: frozenset[str], version: str
) -> tuple[GenerationService, ASGIApp]:
    """Create a service that has not been started, and its application.

    Args:
        keys: the API keys; none disables authentication.

    Raises:
        MoecastError: an invalid size.
    """
    service = GenerationService(
        lambda: _load_permanently(config),
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        observers=[HeapTrimmer()],
    )
    telemetry = Telemetry(service, config, version=version)
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
    )
    routers = [metrics_routes(telemetry.metrics), status_routes(telemetry.status)]
    return service, RequestLogMiddleware(create_app(service, settings, routers=routers))


def _load_permanently(config: ServeConfig) -> LoadedModel:
    """Load the model that this process serves until it ends."""
    loaded = load_model(config)
    freeze_objects()
    return loaded
