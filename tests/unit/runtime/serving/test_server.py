"""The start of a server: its options, its socket, and what it reports to systemd."""

import os
import socket
from contextlib import suppress

import pytest

from predictors.errors import MoecastError
from runtime.serving import server
from runtime.serving.config import ServeConfig
from runtime.serving.server import ServiceManager, listen, server_url
from runtime.serving.service import ServiceState


@pytest.fixture
def systemd(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.setblocking(False)
        yield receiver


def received(systemd: socket.socket) -> list[str]:
    messages = []
    with suppress(BlockingIOError):
        while True:
            messages.append(systemd.recv(4096).decode())
    return messages


def test_manager__reports_each_state(systemd: socket.socket) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": systemd.getsockname()})
    for state in ServiceState:
        manager.on_state(state)
    ending = "STOPPING=1\nSTATUS=finishing running requests"
    assert received(systemd) == ["STATUS=loading the model", "READY=1\nSTATUS=serving", ending]


def test_manager__sends_signs_of_life_in_time(systemd, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(server.time, "monotonic", lambda: now[0])
    environment = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "10000000"}
    manager = ServiceManager({**environment, "WATCHDOG_PID": str(os.getpid())})
    received(systemd)
    sent = []
    for tenth in range(200):
        now[0] = 100 + tenth / 10
        manager.tick(lambda: now[0] < 110)
        sent += [tenth for _ in received(systemd)]
    assert sent == [0, 40, 80], "every 4 of 10 seconds while the engine lives"
    ServiceManager({**environment, "WATCHDOG_PID": str(os.getpid() + 1)}).tick(lambda: True)
    assert received(systemd) == ["STATUS=loading the model"], "another process is watched"


def test_manager__without_systemd_does_nothing(tmp_path, caplog):
    manager = ServiceManager({})
    manager.on_state(ServiceState.READY)
    manager.tick(lambda: True)
    assert not caplog.records
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    assert "systemd was not notified (STATUS=loading the model)" in caplog.text


def test_listen__connections_send_each_part_at_once() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()[:2]):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_listen__on_a_taken_port_is_an_error() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert server_url(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(MoecastError, match=f"port={port}: cannot listen.*choose another port"):
            listen("127.0.0.1", port)


OUTSIDE = [("port", -1), ("port", 65536), ("max_running", 0), ("max_waiting", -1), ("grace", -1)]
INVALID_OPTIONS = [
    *(({name: value}, f"{name}={value}") for name, value in OUTSIDE),
    ({"max_body": "0"}, "max_body=0: must be at least 1 byte"),
    ({"replicas": 2}, "launcher=ray"),
    ({"ray_address": "10.0.0.1:6379"}, "launcher=ray"),
    ({"launcher": "slurm"}, "unknown launcher"),
    ({"max_replicas": 2}, "max_replicas=2: .*launcher=ray"),
    ({"launcher": "ray", "replicas": 0}, "replicas=0"),
    ({"launcher": "ray", "replicas": 3, "max_replicas": 2}, "max_replicas=2: .*at least 3"),
    ({"launcher": "ray", "replica_cpus": 0}, "replica_cpus=0"),
    ({"launcher": "ray", "replica_gpus": -1}, "replica_gpus=-1: must be at least 0"),
    ({"replica_gpus": 1}, "replica_gpus=1: .*launcher=ray"),
    ({"launcher": "ray", "scale_down_seconds": -1.0}, "scale_down_seconds=-1"),
    ({"launcher": "ray", "port": 0, "budget": "50%"}, "port=0"),
    ({"launcher": "ray"}, "budget=auto: with launcher=ray.*budget=4GiB"),
]


@pytest.mark.parametrize(("options", "message"), INVALID_OPTIONS)
def test_serve_config__rejects_invalid_options(options, message):
    with pytest.raises(MoecastError, match=message):
        ServeConfig(**options)


def test_serve_config__accepts_replicas_with_ray():
    config = ServeConfig(launcher="ray", replicas=2, budget="50%")
    assert (config.replicas, config.most_replicas) == (2, 2)
    assert ServeConfig(launcher="ray", max_replicas=3, budget="50%").most_replicas == 3
