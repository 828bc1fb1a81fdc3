"""A picture of the status page of a running server, under requests, by headless Chromium."""

import base64
import io
import json
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
from PIL import Image

from benchmarks.reports import print_line
from benchmarks.serving.config import ScreenshotConfig
from benchmarks.serving.server import ServerProcess, run_server
from predictors.errors import MoecastError
from predictors.files import write_atomic

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROMPTS = ("The heart pumps blood", "Returns a new list of", "A thread waits until the lock")
CLIENTS = 3
WIDTH, HEIGHT = 1200, 1000
TO_BROWSER, FROM_BROWSER = 3, 4
"""File descriptors on which Chromium's `--remote-debugging-pipe` reads and writes."""


def run_screenshot(config: ScreenshotConfig) -> None:
    """Starts a server, sends it requests and takes the picture while they run."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise MoecastError(f"no browser: install one of {', '.join(BROWSERS)}")
    with run_server({"system": "moecast", "budget": config.budget}) as server:
        ends = threading.Event()
        clients = [
            threading.Thread(target=send_requests, args=(server, seed, ends))
            for seed in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        try:
            picture = photograph(browser, f"{server.url}/", seconds=config.seconds)
        finally:
            ends.set()
            for client in clients:
                client.join()
    picture = shrink_picture(picture)
    write_atomic(config.output, picture)
    print_line(f"{config.output}: {len(picture) / 2**10:.0f} KiB")


def shrink_picture(picture: bytes) -> bytes:
    """Returns a PNG with the 256 colours that fit it best, a third as large."""
    file = io.BytesIO()
    image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def send_requests(server: ServerProcess, seed: int, ends: threading.Event) -> None:
    """Sends one request after another, of several lengths, with short pauses."""
    chance = random.Random(seed)
    while not ends.wait(chance.random()):
        body = {
            "prompt": " ".join([chance.choice(PROMPTS)] * chance.randint(1, 8)),
            "max_tokens": chance.choice((16, 32, 48)),
            "seed": seed,
        }
        httpx2.post(f"{server.api}/completions", json=body, timeout=600).raise_for_status()


def photograph(browser: str, url: str, *, seconds: float) -> bytes:
    """Returns the whole page as PNG, after it was open for some time."""
    with open_browser(browser) as call:
        target = call("Target.createTarget", url="about:blank")["targetId"]
        session = call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        call("Emulation.setDeviceMetricsOverride", session, **size)
        call("Page.navigate", session, url=url)
        time.sleep(seconds)
        content = call("Page.getLayoutMetrics", session)["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": content["height"], "scale": 1}
        options = {"format": "png", "captureBeyondViewport": True, "clip": clip}
        return base64.b64decode(call("Page.captureScreenshot", session, **options)["data"])


@contextmanager
def open_browser(browser: str) -> Iterator[Any]:
    """Runs a headless browser and yields a function that calls its debugging protocol."""
    reads, to_browser = os.pipe()
    from_browser, writes = os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--remote-debugging-pipe", f"--user-data-dir={profile}",
        ]  # fmt: skip
        redirect = f'exec "$0" "$@" {TO_BROWSER}<&{reads} {FROM_BROWSER}>&{writes}'
        process = subprocess.Popen(
            ["bash", "-c", redirect, browser, *options],
            pass_fds=(reads, writes),
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        with os.fdopen(to_browser, "wb", buffering=0) as sent, os.fdopen(from_browser, "rb") as got:

            def call(method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
                message: dict[str, Any] = {"id": 1, "method": method, "params": params}
                if session is not None:
                    message["sessionId"] = session
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
