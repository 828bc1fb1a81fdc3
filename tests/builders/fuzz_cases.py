"""Requests that no client would send, from the server's OpenAPI description."""

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx2
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

NEW_TOKENS = 8
"""The server's limit for an answer: the cases are about requests."""
GENERATING = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True)
class FuzzCase:
    """One request."""

    method: str
    path: str
    arguments: dict[str, Any]
    """Arguments of httpx2's `request`."""


def schema_cases(url: str, number: int, seed: int) -> Iterator[FuzzCase]:
    """Yields about `number` cases, spread over operations and modes."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations: list[Any] = [result.ok() for result in schema.get_all_operations()]  # type: ignore[union-attr]
    model = httpx2.get(f"{url}/v1/models").json()["data"][0]["id"]
    rng = random.Random(seed)
    shares = [4 if operation.path in GENERATING else 1 for operation in operations]
    for operation, share in zip(operations, shares, strict=True):
        for mode in GenerationMode:
            wanted = max(1, number * share // (2 * sum(shares)))
            for case in draw_cases(operation.as_strategy(generation_mode=mode), wanted, seed):
                yield FuzzCase(case.method, case.path, request_arguments(case, url, model, rng))


def draw_cases(strategy: Any, number: int, seed: int) -> list[schemathesis.Case]:
    """Draws cases; fewer if there are too few different ones."""
    cases: list[schemathesis.Case] = []

    alone = {"database": None, "deadline": None, "phases": [Phase.generate]}

    @seeded(seed)
    @settings(max_examples=number, suppress_health_check=list(HealthCheck), **alone)
    @given(case=strategy)
    def draw(case: schemathesis.Case) -> None:
        cases.append(case)

    # An operation without arguments has no negative cases.
    with suppress(Unsatisfiable):
        draw()
    return cases


def request_arguments(case: schemathesis.Case, url: str, model: str, rng: random.Random) -> dict:
    """Returns the arguments of a request.

    Most cases get the name of the served model: the others fail at that.
    """
    if isinstance(case.body, dict) and rng.random() < 0.8:
        case.body["model"] = model
        if isinstance(case.body.get("max_tokens"), int) and rng.random() < 0.8:
            case.body["max_tokens"] = rng.randrange(NEW_TOKENS + 1)
        if "prompt" in case.body and rng.random() < 0.5:
            case.body["prompt"] = "The heart"
    given = case.as_transport_kwargs(base_url=url)
    if "data" in given:  # requests' name for a body of bytes
        given["content"] = given["data"]
    names = ("url", "headers", "params", "json", "content")
    return {name: given[name] for name in names if name in given}


def find_fault(client: httpx2.Client, case: FuzzCase) -> tuple[int | None, str | None]:
    """Sends a case; returns the answer's status and the rule that it breaks.

    No answer may be 500 or above, and every refusal must be an error in the shape of its API. The
    status is None for a case that the client cannot send: headers with line breaks, for example.
    """
    try:
        answer = client.request(case.method, **case.arguments)
    except (httpx2.InvalidURL, httpx2.LocalProtocolError, UnicodeError, ValueError):
        return None, None
    except httpx2.TransportError as error:
        return None, f"{case}: no answer: {type(error).__name__}"
    status = answer.status_code
    if status >= 500 or (status >= 400 and not is_error(case.path, answer)):
        return status, f"{case}: {status} {answer.text[:80]!r}"
    return status, None


def is_error(path: str, answer: httpx2.Response) -> bool:
    """Whether a refusal is an error as Anthropic's API writes it, or OpenAI's everywhere else."""
    if answer.request.method == "HEAD":
        return True
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return False
    fields = {"type"} if path.startswith("/v1/messages") else {"type", "param", "code"}
    return isinstance(error["message"], str) and fields <= error.keys()
