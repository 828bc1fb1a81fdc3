"""The status page under hostile names, in a real browser: nothing runs, loads or breaks."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.builders.browser import idle_status, needs_chromium, open_browser, page_server

pytestmark = pytest.mark.slow

LONG = 10_000
NAMES = {
    "script": "<script>window.ran = 1</script>",
    "image": "<img src=x onerror='window.ran = 1'>",
    "other host": "<img src=http://127.0.0.1:9/x><link rel=stylesheet href=//127.0.0.1:9/x>",
    "base": "<base href=//127.0.0.1:9/><meta http-equiv=refresh content='0;url=//127.0.0.1:9'>",
    "style": "</title><style>*{display:none}</style>",
    "attribute": '" onmouseover="window.ran=1" autofocus onfocus="window.ran=1',
    "css": "x;} body {display:none} :root{--cached:url(//127.0.0.1:9)}",
    "terminal": "\x1b[31mred\x07\x00\x08\x7f\x9b31m",
    "bidi": "\u202egnp.exe \u2066abc\u2067def\u200f\u061c \u2069\u202c",
    "marks": "e" + "\u0301" * 400,
    "invisible": "\u200b\u200d\ufeff\u2060" * 50,
    "emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 200,
    "lines": "a\n" * 500 + "\u2028\u2029\x85",
    "long word": "W" * LONG,
    "long text": "word " * (LONG // 5),
    "prototype": "__proto__",
    "empty": "",
    "spaces": " " * LONG,
}
PLACES = ("model", "served", "answers", "tiers", "faults", "state", "version")

WATCH = """window.found = [];
document.addEventListener("securitypolicyviolation", (event) => found.push(
  `${event.violatedDirective} ${event.blockedURI}`));
window.addEventListener("error", (event) => found.push(`error ${event.message}`));
for (const name of ["alert", "eval", "open"]) window[name] = () => found.push(name);"""
LOADED = """new Promise((done) => document.readyState === "complete" ? done()
    : addEventListener("load", done)).then(() => 1)"""
MEASURE = """(async () => {
  await poll();
  const root = document.documentElement, main = document.querySelector("main");
  return JSON.stringify({
    found, ran: window.ran ?? null, text: document.body.innerText,
    state: document.getElementById("state").className,
    loaded: performance.getEntriesByType("resource").map((entry) => entry.name),
    elements: document.querySelectorAll(
      "script, iframe, img, object, embed, base, form, style, link, meta").length,
    excess: root.scrollWidth - root.clientWidth, height: root.scrollHeight,
    top: main.getBoundingClientRect().top + window.scrollY,
    inline: [...document.querySelectorAll("*")].flatMap((one) => one.getAttributeNames())
      .filter((name) => name.startsWith("on")).length,
  });
})()"""


def hostile_status(name: str, place: str) -> dict[str, Any]:
    """A status in which one field is hostile, or all of them."""

    def put(where: str, ordinary: str) -> str:
        return name if place in (where, "all") else ordinary

    texts = {"id": "cmpl-1", "ended_at": "2026-01-01T00:00:00+00:00", "finish_reason": "length"}
    answer = {name: put("answers", text) for name, text in texts.items()}
    answer |= {"prompt_tokens": 3, "new_tokens": 4, "ttft_seconds": 0.1, "tpot_seconds": 0.1}
    counts = "requests hits bytes_moved bytes_prefetched bytes_used bytes_wasted bytes_late"
    names = {key: put("served", "s") for key in ("system", "predictor", "eviction")}
    ordinary = {"model": "m", "version": "1", "state": "ready"}
    return idle_status(
        **{field: put(field, text) for field, text in ordinary.items()},
        answers=[answer] * 3,
        served={**names, "num_layers": 1, "num_experts": 4, "top_k": 2},
        experts=dict.fromkeys([*counts.split(), "needed_predicted"], 5),
        layers=[{"requests": 5, "hits": 5, "recall": None}],
        tiers=[{"name": put("tiers", "cpu"), "used_bytes": 1, "budget_bytes": 2}],
        faults={put("faults", "none"): 1},
        **{"bytes_from": {"disk": 5, "host": 0}, "seconds": {"stall": 0.0, "predictor": 0.0}},
        **{"prefetching": None, "predictor_drift": None, "lost_threads": 0, "cells": ["pcf."]},
    )


@dataclass
class WatchedPage:
    """The status page in a browser, which notes what the policy forbids."""

    call: Callable[..., dict[str, Any]]
    session: str
    url: str
    status: dict[str, Any] = field(default_factory=lambda: hostile_status("m", "none"))
    """What the server answers next."""

    def evaluate(self, script: str) -> Any:
        options = {"expression": script, "awaitPromise": True}
        return self.call("Runtime.evaluate", self.session, **options)["result"].get("value")

    def show(self, name: str, place: str, *, width: int = 1200) -> dict[str, Any]:
        """Lets the page poll a status with this name; returns what became of the page."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", self.session, **size)
        self.status = hostile_status(name, place)
        return json.loads(self.evaluate(MEASURE))


@pytest.fixture(scope="module")
def page() -> Iterator[WatchedPage]:
    """One browser for all names."""
    pages: list[WatchedPage] = []
    with page_server(lambda: pages[0].status) as url, open_browser(needs_chromium()) as call:
        target = call("Target.createTarget", url="about:blank")["targetId"]
        session = call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        pages.append(WatchedPage(call, session, url))
        call("Page.enable", session)
        call("Page.addScriptToEvaluateOnNewDocument", session, source=WATCH)
        call("Page.navigate", session, url=url)
        pages[0].evaluate(LOADED)
        yield pages[0]


def test_watch__sees_what_the_policy_forbids(page: WatchedPage) -> None:
    page.evaluate("""const image = document.createElement("img");
      image.src = "http://127.0.0.1:9/x";
      document.body.append(image);
      try { image.setAttribute("onerror", "ran = 1"); } catch (error) { found.push("thrown"); }""")
    seen = page.show("m", "none")
    kinds = {text.split()[0] for text in seen["found"]}
    assert (kinds, seen["ran"]) == ({"img-src", "require-trusted-types-for", "thrown"}, None)
    page.evaluate("""found.length = 0; document.querySelector("img").remove();
      performance.clearResourceTimings();""")
    assert page.show("m", "none")["found"] == []


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("width", [1200, 360])
def test_hostile_name__is_text_in_every_place(page: WatchedPage, kind: str, width: int) -> None:
    plain = page.show("m", "none", width=width)
    for place in ("all", *PLACES):
        seen = page.show(NAMES[kind], place, width=width)
        assert (seen["ran"], seen["found"], seen["inline"]) == (None, [], 0)
        assert "disconnected" not in seen["state"]
        assert all(name.startswith(page.url) for name in seen["loaded"])
        assert seen["elements"] == plain["elements"]
        assert seen["excess"] <= 0, place
        assert seen["top"] < plain["top"] + 400, place
        assert seen["height"] < plain["height"] + 2000, place
        assert not set(seen["text"]) & set("\u202e\u2066\u2067\x1b\x07\x00"), place
