"""A service and the application around it, as a server's configuration describes them."""

from starlette.types import ASGIApp

from runtime.budget import parse_size
from runtime.engine.memory import keep_for_ever
from runtime.serving.app import Settings, build_app, logged
from runtime.serving.config import ServeConfig
from runtime.serving.opening import name_of, open_served
from runtime.serving.orders import Limits
from runtime.serving.routes import measured, page
from runtime.serving.service import Served, Service
from runtime.serving.thrift import Thrift
from runtime.serving.watch import Watch


def assembled(
    config: ServeConfig, *, keys: frozenset[str], version: str
) -> tuple[Service, ASGIApp]:
    """Nothing is loaded yet: the service does that when it starts.

    Args:
        keys: what clients must show one of.

    Raises:
        MoecastError: a size that is none.
    """
    service = Service(
        lambda: _open_for_ever(config),
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        observers=[Thrift()],
    )
    settings = Settings(
        version=version,
        keys=keys,
        checks_host=config.is_local and not keys and not config.insecure,
        max_body_bytes=parse_size(config.max_body, name="max_body"),
        limits=Limits(
            max_new_tokens=config.max_new_tokens,
            max_choices=config.max_choices,
            max_stop=config.max_stop,
            max_together=config.max_running + config.max_waiting,
        ),
        log_prompts=config.log_prompts,
    )
    watch = Watch(
        model_name=name_of(config),
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        system=config.system.name,
        eviction=config.system.eviction,
        version=version,
    )
    watch.attach(service)
    routers = [measured.routes(watch.metrics), page.routes(watch.status)]
    return service, logged(build_app(service, settings, routers=routers))


def _open_for_ever(config: ServeConfig) -> Served:
    """Such a process serves this model to its end."""
    served = open_served(config)
    keep_for_ever()
    return served
