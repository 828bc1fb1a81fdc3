"""Headless Chromium, where there is one: what a page becomes, and what it looks like."""

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from runtime.serving.api.routes import add_status_routes
from runtime.serving.server import listen, server_url

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
HEADLESS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
SHOWN_SECONDS = 6
"""Of the page's own clock, which runs as fast as the page can."""
TO_BROWSER, FROM_BROWSER = 3, 4
"""File descriptors on which Chromium's `--remote-debugging-pipe` reads and writes."""


def needs_chromium() -> str:
    """The browser's path; skips the test where there is none."""
    for path in filter(None, map(shutil.which, NAMES)):
        return path
    pytest.skip("no Chromium on this machine: the status page is not looked at")


@contextmanager
def page_server(status: Callable[[], dict[str, Any]]) -> Iterator[str]:
    """The URL of a server of the status page, whose `/status` is what the function returns."""
    app = FastAPI()
    add_status_routes(app, status, lambda: (b"", "text/plain"))
    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            yield f"{server_url(listener)}/"
        finally:
            server.should_exit = True
            thread.join(240)


def idle_status(**fields: Any) -> dict[str, Any]:
    """What a server without a model answers; `fields` replace or add."""
    return {
        "model": "m", "version": "1", "state": "ready", "uptime_seconds": 5.0,
        "queue": {"running": 0, "waiting": 0, "max_running": 1, "max_waiting": 1},
        "tokens": {"prompt": 0, "generated": 0, "generated_per_second": 0.0},
        "latency": {"num_answers": 0, "ttft_seconds": None, "tpot_seconds": None},
        "answers": [], "memory": {"resident_bytes": 1}, "served": None, **fields,
    }  # fmt: skip


def document(url: str, folder: Path) -> tuple[str, str]:
    """The page as HTML once its scripts have run, and what the browser complained about."""
    done = _run(url, folder, ["--dump-dom"])
    return done.stdout, "\n".join([line for line in done.stderr.splitlines() if "CONSOLE" in line])


def picture(url: str, folder: Path, *, size=(1200, 1300), dark: bool = False) -> Path:
    """What a person sees, as a PNG."""
    path = folder / "page.png"
    options = ["--blink-settings=preferredColorScheme=0"] if dark else []
    _run(url, folder, [f"--screenshot={path}", f"--window-size={size[0]},{size[1]}", *options])
    return path


def _run(url: str, folder: Path, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [
        *(needs_chromium(), *HEADLESS, "--disable-background-networking", "--no-first-run"),
        *("--disable-component-update", "--enable-logging=stderr"),
        *(f"--user-data-dir={folder / 'profile'}", f"--virtual-time-budget={1000 * SHOWN_SECONDS}"),
        *(*options, url),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)


@contextmanager
def open_browser(browser: str) -> Iterator[Any]:
    """Runs a headless browser and yields a function that calls its debugging protocol."""
    reads, to_browser = os.pipe()
    from_browser, writes = os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        options = [*HEADLESS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        redirect = f'exec "$0" "$@" {TO_BROWSER}<&{reads} {FROM_BROWSER}>&{writes}'
        files = {"pass_fds": (reads, writes), "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(["bash", "-c", redirect, browser, *options], **files)
        os.close(reads)
        os.close(writes)
        with os.fdopen(to_browser, "wb", buffering=0) as sent, os.fdopen(from_browser, "rb") as got:

            def call(method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
                to = {} if session is None else {"sessionId": session}
                message = {"id": 1, "method": method, "params": params, **to}
                sent.write(json.dumps(message).encode() + b"\0")
                while True:
                    answer = read_message(got)
                    if answer.get("id") == 1:
                        return answer["result"]

            try:
                yield call
            finally:
                process.terminate()
                process.wait()


def read_message(stream: Any) -> dict[str, Any]:
    """Reads one message of the protocol, which ends with a zero byte."""
    message = bytearray()
    while (byte := stream.read(1)) not in (b"\0", b""):
        message += byte
    return json.loads(message)
