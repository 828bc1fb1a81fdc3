"""Requests that nobody would send: does any make the server fail?

    python -m benchmarks.serving.fuzz

`cases=1500` requests, eight at a time: two in three made by schemathesis from the server's own
OpenAPI description, half of them well-formed and half not, and each third a valid request of which
bytes were changed. No answer may be 500 or beyond, every refusal must be an error in OpenAI's
shape, and afterwards nothing may run, wait or be pinned, and the server must answer. `seed=0`.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx2
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from benchmarks.serving.results import here, keep
from benchmarks.serving.server import Server, server

TOGETHER = 8
NEW_TOKENS = 8
"""The most that the server is told to make for one answer: cases are about requests."""
GENERATING = ("/v1/completions", "/v1/chat/completions")
VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/completions",
        {
            "prompt": "The heart",
            "max_tokens": 4,
            "temperature": 0.7,
            "logprobs": 2,
            "echo": True,
            "stop": ["\n", "é"],
            "seed": 7,
            "n": 2,
            "logit_bias": {"11": -1.5},
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "You are brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            ],
            "max_completion_tokens": 4,
            "top_p": 0.9,
            "logprobs": True,
            "top_logprobs": 3,
        },
    ),
    ("/tokenize", {"prompt": "The heart", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
)


@dataclass(frozen=True)
class Shot:
    """One request, and what made it."""

    source: str
    method: str
    path: str
    arguments: dict[str, Any]
    """Of httpx2's `request`."""


def from_schema(url: str, number: int, seed: int) -> Iterator[Shot]:
    """About so many, spread over operations and modes."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    model = httpx2.get(f"{url}/v1/models").json()["data"][0]["id"]
    draw = random.Random(seed)
    for operation in operations:
        for mode in GenerationMode:
            share = 4 if operation.path in GENERATING else 1
            total = sum(4 if one.path in GENERATING else 1 for one in operations)
            wanted = max(1, number * share // (2 * total))
            found: list[schemathesis.Case] = []
            collect(operation.as_strategy(generation_mode=mode), wanted, seed, found)
            for case in found:
                yield Shot(str(mode), case.method, case.path, sent(case, url, model, draw))


def collect(strategy: Any, number: int, seed: int, found: list[schemathesis.Case]) -> None:
    """Draws cases; fewer where there are not so many different ones."""

    @seeded(seed)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def draw(case: schemathesis.Case) -> None:
        found.append(case)

    # An operation that takes nothing can not be asked wrongly.
    with suppress(Unsatisfiable):
        draw()


def sent(case: schemathesis.Case, url: str, model: str, draw: random.Random) -> dict[str, Any]:
    """As it goes out. Most name the model that is served, or none would get further."""
    if isinstance(case.body, dict) and draw.random() < 0.8:
        case.body["model"] = model
        if isinstance(case.body.get("max_tokens"), int) and draw.random() < 0.8:
            case.body["max_tokens"] = draw.randrange(NEW_TOKENS + 1)
        if "prompt" in case.body and draw.random() < 0.5:
            case.body["prompt"] = "The heart"
    given = case.as_transport_kwargs(base_url=url)
    if "data" in given:  # requests' name for a body of bytes
        given["content"] = given["data"]
    names = ("url", "headers", "params", "json", "content")
    return {name: given[name] for name in names if name in given}


def damaged(url: str, number: int, seed: int) -> Iterator[Shot]:
    """Valid requests with a few bytes changed, left out, doubled, or cut off."""
    draw = random.Random(seed)
    for _ in range(number):
        path, body = draw.choice(VALID)
        content = bytearray(json.dumps(body, ensure_ascii=draw.random() < 0.5).encode())
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(content))
            kind = draw.randrange(5)
            if kind == 0:
                content[place] = draw.randrange(256)
            elif kind == 1:
                del content[place]
            elif kind == 2:
                content[place:place] = draw.choice(
                    (b"-", b"9" * 30, b"null", b"\\ud800", b"[" * 99)
                )
            elif kind == 3:
                content[place:place] = content[place : place + 20]
            else:
                content = content[: max(1, place)]
        headers = {"Content-Type": draw.choice(("application/json",) * 8 + ("text/plain", ""))}
        given = {"url": url + path, "content": bytes(content), "headers": headers}
        yield Shot("damaged", "POST", path, given)


def shoot(client: httpx2.Client, shot: Shot) -> dict[str, Any]:
    """The status, and what is wrong with the answer."""
    try:
        answer = client.request(shot.method, **shot.arguments)
    except (httpx2.InvalidURL, httpx2.LocalProtocolError, UnicodeError, ValueError) as error:
        # A client that cannot even send it: headers with line breaks, paths without meaning.
        return {"status": None, "wrong": None, "why": type(error).__name__}
    except httpx2.TransportError as error:
        return {"status": None, "wrong": f"no answer: {type(error).__name__}"}
    wrong = None
    if answer.status_code >= 500:
        wrong = f"status {answer.status_code}"
    elif answer.status_code >= 400 and not is_openai_error(answer):
        wrong = f"status {answer.status_code} in another shape: {answer.text[:80]!r}"
    return {"status": answer.status_code, "wrong": wrong}


def is_openai_error(answer: httpx2.Response) -> bool:
    if answer.request.method == "HEAD":
        return True
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(error["message"], str) and {"type", "param", "code"} <= error.keys()


def fuzz(target: Server, *, cases: int, seed: int, together: int = TOGETHER) -> dict[str, Any]:
    """Sends them all; what was answered, and whether the server is as it was."""
    shots = [*from_schema(target.url, cases * 2 // 3, seed), *damaged(target.url, cases // 3, seed)]
    random.Random(seed).shuffle(shots)
    with httpx2.Client(timeout=120) as client, ThreadPoolExecutor(together) as pool:
        answers = list(pool.map(lambda shot: shoot(client, shot), shots))
    wrong = [
        {"method": shot.method, "path": shot.path, "source": shot.source, "wrong": answer["wrong"]}
        for shot, answer in zip(shots, answers, strict=True)
        if answer["wrong"] is not None
    ]
    target.wait_idle()
    body = {"prompt": "The heart", "max_tokens": 4}
    after = httpx2.post(f"{target.api}/completions", json=body, timeout=60)
    return {
        "cases": sum(answer["status"] is not None for answer in answers),
        "never_sent": sum(answer["status"] is None for answer in answers),
        "sources": dict(sorted(Counter(shot.source for shot in shots).items())),
        "statuses": dict(sorted(Counter(str(answer["status"]) for answer in answers).items())),
        "statuses_by_path": {
            path: dict(sorted(counted.items()))
            for path, counted in sorted(by_path(shots, answers).items())
        },
        "wrong": wrong,
        "left": target.taken(),
        "answers_afterwards": after.status_code == 200,
    }


def by_path(shots: list[Shot], answers: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for shot, answer in zip(shots, answers, strict=True):
        found.setdefault(shot.path, Counter())[str(answer["status"])] += 1
    return found


def main(arguments: dict[str, str]) -> None:
    described = here()
    with server({"max_new_tokens": NEW_TOKENS, "max_waiting": 64}) as target:
        found = fuzz(
            target,
            cases=int(arguments.get("cases", 1500)),
            seed=int(arguments.get("seed", 0)),
        )
    found["is_reached"] = (
        found["cases"] >= 1000
        and not found["wrong"]
        and not any(found["left"].values())
        and found["answers_afterwards"]
    )
    keep("fuzz", found, arguments, described)


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
