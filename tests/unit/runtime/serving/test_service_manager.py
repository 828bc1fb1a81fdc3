"""The server reports to systemd what its unit waits for, and sends signs of life."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.serving import service_manager
from runtime.serving.service import ServiceState
from runtime.serving.service_manager import ServiceManager


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.setblocking(False)
        yield receiver


def received(systemd: socket.socket) -> list[str]:
    messages = []
    while True:
        try:
            messages.append(systemd.recv(4096).decode())
        except BlockingIOError:
            return messages


def test_manager__reports_each_state(systemd: socket.socket) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": systemd.getsockname()})
    for state in ServiceState:
        manager.on_state(state)
    assert received(systemd) == [
        "STATUS=loading the model",
        "READY=1\nSTATUS=serving",
        "STOPPING=1\nSTATUS=finishing running requests",
    ]


def test_manager__sends_signs_of_life_in_time(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(service_manager.time, "monotonic", lambda: now[0])
    environment = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "10000000"}
    manager = ServiceManager({**environment, "WATCHDOG_PID": str(os.getpid())})
    received(systemd)
    sent = []
    for tenth in range(200):
        now[0] = 100 + tenth / 10
        manager.tick(lambda: now[0] < 110)
        sent += [tenth for _ in received(systemd)]
    assert sent == [0, 40, 80], "every 4 of 10 seconds while the engine lives"
    other = ServiceManager({**environment, "WATCHDOG_PID": str(os.getpid() + 1)})
    other.tick(lambda: True)
    assert received(systemd) == ["STATUS=loading the model"], "another process is watched"


def test_manager__without_systemd_does_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = ServiceManager({})
    manager.on_state(ServiceState.READY)
    manager.tick(lambda: True)
    assert not caplog.records
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    assert "systemd was not notified (STATUS=loading the model)" in caplog.text
