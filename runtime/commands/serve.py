"""`moecast serve`: an OpenAI-compatible server."""

import asyncio
import atexit
import gc
import logging
import os
import sys
from typing import Any

from predictors.errors import MoecastError
from predictors.origin import package_version
from runtime.commands.progress import print_line
from runtime.engine.memory import share_one_heap
from runtime.serving.config import RAY, ServeConfig
from runtime.serving.ray_cluster import prepare


class EngineFailed(RuntimeError):
    """An internal error ended the engine thread while the server was running."""


def run(config: ServeConfig) -> dict[str, Any]:
    """Serve until a signal; returns why the server ended, and the engine's statistics."""
    share_one_heap()
    # Imported here: libraries that these import start threads, which then share the heap.
    from runtime.serving.app import create_server
    from runtime.serving.edge.middleware import KEY_VARIABLE, load_api_keys
    from runtime.serving.logs import STDERR, DroppingHandler, configure_json_logging
    from runtime.serving.observe.recording import open_recorder
    from runtime.serving.observe.tracing_settings import open_tracing
    from runtime.serving.server import ServiceManager, listen, serve, server_url

    keys = load_api_keys(config.api_key, os.environ)
    if not (keys or config.is_local or config.insecure):
        raise MoecastError(
            f"host={config.host}: other machines can reach this address; set api_key=... or "
            f"{KEY_VARIABLE}, or insecure=true to serve without authentication"
        )
    version = package_version("moecast") or ""
    if config.launcher == RAY:
        prepare(config.ray_address)
        # Imported here: it needs the extra, and Ray reads the environment when it is imported.
        from runtime.serving.replicas import run as serve_replicas

        return serve_replicas(config, keys, version)
    tracing = open_tracing(os.environ, version=version)
    configure_json_logging(DroppingHandler(STDERR), secrets=keys)
    recorder = open_recorder(config)
    service, app = create_server(
        config, keys=keys, version=version, tracing=tracing, recorder=recorder
    )
    with listen(config.host, config.port) as listener:
        url = server_url(listener)

        def print_url() -> None:
            name = config.served_names[0]
            print_line(f"{name} at {url}/v1")

        reason = asyncio.run(
            serve(
                app,
                service,
                listener,
                grace_seconds=config.grace,
                on_listening=print_url,
                manager=ServiceManager(os.environ),
            )
        )
    if tracing is not None:
        tracing.close()
    # A last garbage collection over all objects of Torch and Transformers would take seconds of the
    # short time between SIGTERM and SIGKILL.
    gc.freeze()
    if isinstance(service.error, MoecastError):
        raise service.error
    if service.error is not None:
        raise EngineFailed(f"the engine failed: {service.error}") from service.error
    if not service.close(timeout_seconds=0):
        exit_without_thread()
    loaded = service.loaded
    return {
        "model": config.model.name,
        "url": url,
        "ended": reason,
        "stats": None if loaded is None else loaded.model.moecast.stats(),
        "recording": recorder and recorder.status(),
    }


def exit_without_thread() -> None:
    """End the process at exit without unwinding the engine thread, where Python would abort.

    The thread is still in a load or a forward pass, which nothing can interrupt.
    """

    @atexit.register
    def exit_now() -> None:
        sys.stdout.flush()
        logging.shutdown()
        os._exit(0)
