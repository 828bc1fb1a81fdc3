"""Texts, ends and log-probabilities as clients read them from whole answers and streams."""

from typing import Any

import pytest

from tests.builders.forced_text import END
from tests.builders.plain_answers import PlainAnswers, ids, text_of
from tests.builders.serving import PROMPTS, RunningServer, running_server, tiny
from tests.unit.runtime.serving.test_completions import ASKED, CHAT, COMPLETIONS, HELLO, events, raw


@pytest.fixture(scope="module")
def text(plain: PlainAnswers) -> str:
    """A greedy answer of thirty tokens."""
    return plain.text(PROMPTS[0], 30)


def body(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPTS[0], "max_tokens": 30, "temperature": 0, **more}


def choices_of(server: RunningServer, path: str, stream: bool, fields: Any) -> list[Any]:
    """The choice of each event of a stream, or of the whole answer."""
    answers = events(server, path, **fields) if stream else [raw(server, path, **fields)]
    return [answer["choices"][0] for answer in answers]


def pieces(choices: list[dict[str, Any]]) -> list[str | None]:
    return [c["text"] if "text" in c else c["delta"].get("content") for c in choices]


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("max_tokens", [1, 2, 30])
def test_reason_of_the_end__comes_after_all_text(server, text, path, max_tokens):
    more = {"max_tokens": max_tokens, "temperature": 0, "stop": text + " never"}
    (whole,) = choices_of(server, path, False, ASKED[path] | more)
    *before, last = choices_of(server, path, True, ASKED[path] | more)
    assert [choice["finish_reason"] for choice in before] == [None] * len(before)
    assert last["finish_reason"] == whole["finish_reason"]
    assert pieces([last]) == ([""] if path == COMPLETIONS else [None])
    expected = whole["text"] if path == COMPLETIONS else whole["message"]["content"]
    assert "".join(piece or "" for piece in pieces(before)) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string__ends_the_text_and_its_logprobs(server, text, stream):
    stop = text[20:24]
    choices = choices_of(server, COMPLETIONS, stream, body(stop=[stop, "never\0"], logprobs=1))
    written = "".join(choice["text"] for choice in choices)
    assert written == text[: text.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"
    tokens = [token for c in choices if c["logprobs"] for token in c["logprobs"]["tokens"]]
    assert "".join(tokens).startswith(written)
    assert "".join(tokens[:-1]) == written[: len("".join(tokens[:-1]))] != written
    for choice in choices:
        assert choice["logprobs"] is None or choice["logprobs"]["tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs__do_not_have_the_token_that_ends(server: RunningServer, stream: bool) -> None:
    fields = {"messages": HELLO, "max_tokens": 5, "temperature": 0, "logprobs": True}
    choices = choices_of(server, CHAT, stream, fields | {"logit_bias": {str(END): 100}})
    assert choices[-1]["finish_reason"] == "stop"
    assert [choice["logprobs"] for choice in choices] == [None] * len(choices)


def test_stop_strings__count_after_min_tokens(server: RunningServer, text: str) -> None:
    tokens = ids(text)
    early = text_of(tokens[:2])[-2:]
    assert raw(server, COMPLETIONS, **body(stop=early))["usage"]["completion_tokens"] <= 2
    answer = raw(server, COMPLETIONS, **body(stop=early, min_tokens=12))
    written = answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] > 12
    assert text.startswith(written)
    later = text.find(early, len(text_of(tokens[:12])))
    assert len(written) >= (later if later >= 0 else len(text)) - len(early)


def test_served_names__are_listed_and_a_star_takes_all(folder):
    with running_server(lambda: tiny(folder, served_name="first,second,*")) as server:
        client = server.openai()
        assert [model.id for model in client.models.list()] == ["first", "second"]
        for name in ("first", "second", "tiny", "gpt-4o"):
            answer = raw(server, COMPLETIONS, prompt="a", max_tokens=1, model=name)
            assert answer["model"] == "first"
            assert client.models.retrieve(name).id == name
