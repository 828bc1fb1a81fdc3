"""A real nginx in front of a server, with examples/deploy/nginx.conf."""

import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import httpx2
import pytest

from benchmarks.serving.server import run_server
from tests.builders.pages import free_port
from tests.builders.serving import speaking_model
from tests.builders.waiting import wait_for
from tests.docs.pages import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(280)]

CONFIGURATION = ROOT / "examples" / "deploy" / "nginx.conf"
KEY = "a-key"
BODY = {"prompt": "The heart", "max_tokens": 20, "ignore_eos": True}
MAIN = """
daemon off;
error_log stderr;
pid {folder}/pid;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/moecast.conf;
}}
"""


@pytest.fixture(scope="module")
def proxy(debian_program: Callable[[str, str], str], tmp_path_factory: pytest.TempPathFactory):
    """The address of nginx, whose file has other ports, certificates and times."""
    nginx = debian_program("nginx", "nginx-light")
    folder = tmp_path_factory.mktemp("nginx")
    folder.chmod(0o755)
    certificate = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    certificate += ["-subj", "/CN=localhost", "-keyout", "privkey.pem", "-out", "fullchain.pem"]
    subprocess.run(certificate, cwd=folder, check=True, capture_output=True, timeout=60)
    model = speaking_model(folder / "model")
    with ExitStack() as stack:
        server = stack.enter_context(run_server({"model.id": model, "api_key": KEY}, folder=folder))
        port = free_port()
        text = CONFIGURATION.read_text()
        for given, used in {
            "127.0.0.1:8000": server.url.removeprefix("http://"),
            "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
            "/etc/ssl/moecast": str(folder),
            "client_header_timeout 10s": "client_header_timeout 2s",
        }.items():
            assert given in text
            text = text.replace(given, used)
        (folder / "moecast.conf").write_text(text)
        (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
        command = [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf")]
        process = stack.enter_context(subprocess.Popen(command))
        stack.callback(process.terminate)
        wait_for(lambda: is_open(port, process), "nginx takes connections", seconds=60)
        yield f"https://127.0.0.1:{port}"


def is_open(port: int, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


def client(proxy: str, key: str = KEY) -> httpx2.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.Client(base_url=proxy, headers=headers, verify=False, timeout=60)


def connect(proxy: str) -> ssl.SSLSocket:
    host, port = proxy.removeprefix("https://").split(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection((host, int(port)), timeout=60))


def test_proxy__passes_answers_and_streams_each_token_at_once(proxy: str) -> None:
    with client(proxy) as https:
        assert https.post("/v1/completions", json=BODY).json()["usage"]["completion_tokens"] == 20
        with https.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream:
            pieces = list(stream.iter_raw())
        assert len(pieces) > 5
        assert pieces[-1].endswith(b"data: [DONE]\n\n")


def test_proxy__leaves_keys_to_the_server_and_refuses_large_bodies(proxy: str) -> None:
    with client(proxy, "wrong") as https:
        assert https.get("/v1/models").status_code == 401
    with client(proxy) as https:
        headers = {"Content-Type": "application/json"}
        large = https.post("/v1/completions", content=b"x" * (2 << 20), headers=headers)
        assert large.status_code == 413


def test_proxy__ends_slow_headers_and_bounds_the_connections_of_an_address(proxy: str) -> None:
    with connect(proxy) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX: ")
        assert slow.recv(100) == b""
    with ExitStack() as stack, client(proxy) as https:
        head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n{"
        for _ in range(16):
            stack.enter_context(connect(proxy)).sendall(head)
        time.sleep(0.5)
        assert https.get("/health").status_code == 429
