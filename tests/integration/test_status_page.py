"""The status page in a real browser: content, looks, and no script errors."""

import re

import httpx2
import pytest
from PIL import Image

from tests.builders.browser import document, idle_status, needs_chromium, page_server, picture
from tests.builders.forked import run_server as started
from tests.builders.waiting import wait_for

KEY = "the-test's-key"
CACHED = {"light": (0x1F, 0x66, 0xBD), "dark": (0x5B, 0x9B, 0xE6)}
"""Values of `--cached` in page.css."""
BACKGROUND = {"light": (0xFC, 0xFC, 0xFB), "dark": (0x14, 0x14, 0x13)}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of the reference model that has answered one request."""
    folder = tmp_path_factory.mktemp("server")
    options = {"system": "moecast", "budget": "50%", "model.dtype": "float32"}
    with started(options, environment={"MOECAST_API_KEY": KEY}, folder=folder) as server:
        body = {"prompt": "The heart pumps blood", "max_tokens": 24, "temperature": 0}
        answer = httpx2.post(f"{server.api}/completions", json=body, auth=("", KEY), timeout=240)
        answer.raise_for_status()
        # The request's place is free only after it was answered.
        wait_for(lambda: status_of(server)["queue"]["running"] == 0, "an idle server")
        yield server


def status_of(server) -> dict:
    return httpx2.get(f"{server.url}/status", auth=("", KEY)).json()


@pytest.fixture(scope="module")
def url(server) -> str:
    """The page's URL with the key as the password."""
    needs_chromium()
    return server.url.replace("http://", f"http://:{KEY}@") + "/"


def text_of(dom: str, name: str) -> str:
    """The visible text of the element with this id."""
    match = re.search(rf'<(\w+)[^>]* id="{name}"[^>]*>(.*?)</\1>', dom, re.DOTALL)
    assert match, name
    return " ".join(re.sub(r"<[^>]*>", " ", match[2]).split())


def test_status__agrees_with_itself_and_has_no_prompts(server) -> None:
    status = status_of(server)
    assert "heart" not in str(status)
    (answer,), (tier,) = status["answers"], status["tiers"]
    assert (answer["new_tokens"], answer["finish_reason"]) == (24, "length")
    assert answer["tpot_seconds"] == status["latency"]["tpot_seconds"]["p50"] > 0
    assert tier["num_pinned"] == 0
    assert status["bytes_from"]["disk"] == status["experts"]["bytes_moved"] > 0
    assert [len(row) for row in status["cells"]] == [60] * 12
    cells = "".join(status["cells"])
    # Read after the tiers: prefetches may have filled more slots.
    assert tier["num_used"] <= cells.count("c") + cells.count("f") <= tier["num_slots"]


def test_browser__reports_a_script_that_fails(tmp_path) -> None:
    _, complaints = document("data:text/html,<script>missing()</script>", tmp_path)
    assert "missing is not defined" in complaints


def test_browser__shows_the_servers_counts(server, url: str, tmp_path) -> None:
    dom, complaints = document(url, tmp_path)
    status = status_of(server)
    assert complaints == ""
    assert (text_of(dom, "state"), text_of(dom, "model")) == ("ready", "qwen2-moe-tiny")
    assert text_of(dom, "served") == "system moecast, predictor residual, eviction reuse"
    rate = 100 * status["experts"]["hits"] / status["experts"]["requests"]
    shown = {
        "hits": f"{rate:.1f} % overall; idle now", "tokens": "24 generated",
        "ttft": "last 1 answers", "answers": status["answers"][0]["id"][:12],
        "moved": "from disk, in total", "queue": "0 running of 8; 0 of 64 waiting",
        "facts": "failed transfers none",
    }  # fmt: skip
    for name, text in shown.items():
        assert text in text_of(dom, name), name
    assert "24" in text_of(dom, "answers").split()
    present = "".join(status["cells"]).count("c")
    assert text_of(dom, "cells-summary").startswith(f"{present} of 720 experts are cached")
    assert dom.count('<th scope="row"') == 12 + len(status["answers"])
    assert 'class="trace" d="M' in dom  # a curve of more than one poll


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_browser__draws_the_map(server, url: str, tmp_path, theme: str):
    image = Image.open(picture(url, tmp_path, dark=theme == "dark")).convert("RGB")
    pixels = {colour: number for number, colour in image.getcolors(1 << 24)}
    status = status_of(server)
    assert pixels[BACKGROUND[theme]] > 50_000
    # A cell has at least 8 by 8 pixels of one colour at this width.
    assert pixels[CACHED[theme]] > 64 * "".join(status["cells"]).count("c")


def test_browser__cuts_nothing_off_on_a_phone(url: str, tmp_path) -> None:
    # Chromium has no narrower windows.
    image = Image.open(picture(url, tmp_path, size=(500, 1800))).convert("RGB")
    last_columns = {image.getpixel((x, y)) for x in range(490, 500) for y in range(0, 1800, 7)}
    assert last_columns == {BACKGROUND["light"]}


def test_browser__shows_that_the_server_stopped_answering(tmp_path) -> None:
    needs_chromium()
    polls: list[int] = []

    def status() -> dict:
        polls.append(1)
        if len(polls) % 100 > 2:
            raise RuntimeError("the test's server has had enough")
        return idle_status(state="loading", uptime_seconds=float(len(polls)))

    with page_server(status) as url:
        dom, _ = document(url, tmp_path)
    assert text_of(dom, "model") == "m"
    assert text_of(dom, "state").startswith("the server answers 500; last update at")
    assert 'class="disconnected"' in dom
