"""Reports the server's state to systemd, as sd_notify(3) says: Type=notify and WatchdogSec=."""

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

from runtime.serving.service import ServiceState

log = logging.getLogger(__name__)

MESSAGES = {
    ServiceState.READY: "READY=1\nSTATUS=serving",
    ServiceState.DRAINING: "STOPPING=1\nSTATUS=finishing running requests",
}
LOADING = "STATUS=loading the model"
ALIVE = "WATCHDOG=1"
SHARE = 0.4
"""A sign of life is sent after this share of the time after which systemd ends the server."""


class ServiceManager:
    """systemd, if it started this process and asked for messages; otherwise nothing is sent."""

    def __init__(self, environment: Mapping[str, str]):
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = f"\0{self._address[1:]}"
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        limit_us = environment.get("WATCHDOG_USEC", "0") if is_ours else "0"
        self._interval = float(limit_us) / 1e6 * SHARE
        self._sent_at = 0.0
        self._send(LOADING)

    def on_state(self, state: ServiceState) -> None:
        if state in MESSAGES:
            self._send(MESSAGES[state])

    def tick(self, is_alive: Callable[[], bool]) -> None:
        """Send a sign of life if it is time for one; call this often from the server's loop.

        Args:
            is_alive: whether the engine's thread runs. Without it, systemd ends the server.
        """
        if not self._interval or time.monotonic() - self._sent_at < self._interval:
            return
        if is_alive():
            self._sent_at = time.monotonic()
            self._send(ALIVE)

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as client:
                client.connect(self._address)
                client.sendall(message.encode())
        except OSError as error:
            log.warning("systemd was not notified (%s): %s", message.partition("\n")[0], error)
