"""What runs in a replica: the whole server but its socket."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

from runtime.engine.memory import share_one_heap
from runtime.engine.monitor import CACHED, PINNED, Monitor
from runtime.ray_cluster import keep_to_loopback
from runtime.serving.assembly import assembled
from runtime.serving.config import ServeConfig
from runtime.serving.replicas.exchange import Wire, exchanged
from runtime.serving.service import State

POLL_SECONDS = 0.05


class Engine:
    """Made when it is asked to load; then it answers until it is told to end.

    Args:
        edition: of the deployment; another one makes Ray replace every replica.

    Raises:
        MoecastError: the model can not be loaded.
    """

    def __init__(self, config: ServeConfig, keys: frozenset[str], version: str, edition: int):
        share_one_heap()
        if config.cluster is None:
            keep_to_loopback()
        self.edition = edition
        self._config = config
        self._service, self._app = assembled(config, keys=keys, version=version)
        self._service.start()
        while self._service.state is State.LOADING:
            time.sleep(POLL_SECONDS)
        if self._service.error is not None:
            raise self._service.error
        served = self._service.served
        assert served is not None
        self._spec = served.model.moecast.spec
        self._monitor = Monitor(served.model.moecast.engine)

    async def answer(
        self, wire: Wire, _forecast: object = None
    ) -> AsyncIterator[MutableMapping[str, Any]]:
        """ASGI messages; the forecast is for the router that chose this replica."""
        async with contextlib.aclosing(exchanged(self._app, wire)) as messages:  # type: ignore[type-var]
            async for message in messages:
                yield message

    def spec(self) -> dict[str, Any]:
        """The model's shape."""
        return self._spec.as_dict()

    def record_routing_stats(self) -> dict[str, Any]:
        """What routers see of it: which experts are where they are computed, as hexadecimal digits
        of a bit for each expert, layer after layer.
        """
        cells = "".join(self._monitor.cells())
        bits = "".join("1" if cell in (CACHED, PINNED) else "0" for cell in cells)
        return {"resident": f"{int('1' + bits, 2):x}", "state": str(self._service.state)}

    def check_health(self) -> None:
        """Ray replaces a replica whose check fails.

        Raises:
            RuntimeError: the engine thread has ended.
        """
        if not self._service.is_alive:
            raise RuntimeError(f"the engine has ended: {self._service.error}")

    async def end(self) -> None:
        """Completes what was accepted, for as long as the grace lasts."""
        self._service.drain()
        await asyncio.to_thread(self._service.wait_idle, self._config.grace)
        await asyncio.to_thread(self._service.close, timeout_seconds=2.0)

    async def __del__(self) -> None:
        # Ray awaits it before it ends the process.
        await self.end()
