"""`python -m runtime serve`: an OpenAI-compatible server."""

import asyncio
import atexit
import gc
import os
import sys
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from predictors.errors import MoecastError
from predictors.versions import package_version
from runtime.engine.memory import share_one_heap
from runtime.ray_cluster import prepare
from runtime.serving.config import RAY, ServeConfig

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
"""The extra `serve`."""


class EngineFailed(RuntimeError):
    """Ours, not the user's: the engine thread ended in an error while serving."""


def run(config: ServeConfig) -> dict[str, Any]:
    """Serves until it is told to end; returns what it has done."""
    share_one_heap()
    require_extra()
    # Not before: they need the extra.
    from runtime.serving.assembly import assembled
    from runtime.serving.keys import VARIABLE, keys_of
    from runtime.serving.logs import log_as_json
    from runtime.serving.opening import name_of
    from runtime.serving.server import listen, serve, url_of

    keys = keys_of(config.key, os.environ)
    if not (keys or config.is_local or config.insecure):
        raise MoecastError(
            f"host={config.host} can be reached from other machines: set key=... or {VARIABLE}, "
            "or insecure=true if anybody may use the model"
        )
    if config.launcher == RAY:
        prepare(config.cluster)
        # Not before: it needs the extra, and Ray reads the environment when it is imported.
        from runtime.serving.replicas import run as serve_replicas

        return serve_replicas(config, keys, package_version("moecast") or "")
    log_as_json(secrets=keys)
    service, app = assembled(config, keys=keys, version=package_version("moecast") or "")
    console = Console()
    with listen(config.host, config.port) as listener:
        url = url_of(listener)

        def tell() -> None:
            console.print(f"{name_of(config)} at {url}/v1", highlight=False, soft_wrap=True)

        reason = asyncio.run(
            serve(
                app,
                service,
                listener,
                grace_seconds=config.grace,
                on_listening=tell,
            )
        )
    # Python would look through all that Torch and Transformers made once more, which takes seconds
    # of the few that a process is given between being told to end and being killed.
    gc.freeze()
    if isinstance(service.error, MoecastError):
        raise service.error
    if service.error is not None:
        raise EngineFailed(f"the engine failed: {service.error}") from service.error
    if not service.close(timeout_seconds=0):
        leave_thread()
    served = service.served
    return {
        "model": name_of(config),
        "url": url,
        "ended": reason,
        "stats": None if served is None else served.model.moecast.stats(),
    }


def require_extra() -> None:
    """Raises MoecastError when the server's packages are not installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise MoecastError(f"serve needs {', '.join(missing)}: pip install '.[serve]'")


def leave_thread() -> None:
    """The engine thread is still in a load or a forward pass, which nothing can interrupt.

    Python would abort while it takes such a thread's stack apart. So the process ends without that.
    """

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    atexit.register(end)
