"""The listening socket."""

import socket

import pytest

from predictors.errors import MoecastError
from runtime.serving.server import listen, server_url


def test_listen__connections_send_each_part_at_once() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()[:2]):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_listen__on_a_taken_port_is_an_error() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert server_url(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(MoecastError, match=f"port={port}: cannot listen"):
            listen("127.0.0.1", port)
