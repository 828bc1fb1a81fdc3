"""Malformed bodies of a megabyte end in one error, before their items are validated."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from runtime.serving.api.body_fields import MAX_FIELDS, MAX_ITEMS
from runtime.serving.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest
from runtime.serving.api.schemas import TokenizeRequest as Tokenize
from tests.unit.runtime.serving.test_completions import user

MANY = 200_000
FIELDS = {f"field{i}": 1 for i in range(MANY)}


MALFORMED: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "prompt of empty lists": (CompletionRequest, {"prompt": [[]] * MANY}),
    "prompt of a text and nulls": (CompletionRequest, {"prompt": ["a"] + [None] * MANY}),
    "prompt of a token and texts": (CompletionRequest, {"prompt": [1] + ["a"] * MANY}),
    "prompt of a list of texts": (CompletionRequest, {"prompt": [["a"] * MANY]}),
    "stop_token_ids": (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * MANY}),
    "logit_bias": (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(FIELDS, "a")}),
    "fields": (CompletionRequest, {"prompt": "a", **FIELDS}),
    "stream_options": (CompletionRequest, {"prompt": "a", "stream_options": FIELDS}),
    "messages of numbers": (ChatRequest, {"messages": [1] * MANY}),
    "messages of empty objects": (ChatRequest, {"messages": [{}] * MANY}),
    "content of numbers": (ChatRequest, {"messages": user([1] * MANY)}),
    "parts of messages": (ChatRequest, {"messages": user([{}] * MAX_ITEMS) * 49}),
    "fields of a message": (ChatRequest, {"messages": user("a", **FIELDS)}),
    "messages to tokenize": (Tokenize, {"messages": [[]] * MANY}),
    "tokens": (DetokenizeRequest, {"tokens": ["a"] * MANY}),
}


def count_errors(body: type[BaseModel], fields: dict[str, Any]) -> int:
    with pytest.raises(ValidationError) as caught:
        body.model_validate(fields)
    return caught.value.error_count()


@pytest.mark.parametrize("name", MALFORMED)
def test_bodies__a_megabyte_of_errors_is_a_few(name: str) -> None:
    assert count_errors(*MALFORMED[name]) <= 2


def test_bodies__many_messages_of_many_fields_stop_at_the_first() -> None:
    message = {"role": "user", **{f"field{i}": 1 for i in range(MAX_FIELDS - 1)}}
    assert count_errors(ChatRequest, {"messages": [message] * MAX_ITEMS}) < MAX_FIELDS


def test_messages__are_bounded_by_all_their_parts() -> None:
    part = {"type": "text", "text": "a"}
    full = user([part] * (MAX_ITEMS // 2)) * 2
    assert ChatRequest.model_validate({"messages": full}).messages[1].text
    with pytest.raises(ValidationError, match=f"they have {MAX_ITEMS + 1} parts") as caught:
        ChatRequest.model_validate({"messages": full + user([part])})
    assert caught.value.errors()[0]["loc"] == ("messages",)


class Untouched(dict[str, Any]):
    """Fails as soon as its fields are looked at."""

    def items(self) -> Any:
        raise AssertionError("looked at before their number was checked")

    get = __iter__ = keys = values = items


@pytest.mark.parametrize("body", [CompletionRequest, ChatRequest, DetokenizeRequest])
def test_many_fields__are_refused_before_any_is_looked_at(body: type[BaseModel]) -> None:
    with pytest.raises(ValidationError, match=f"{MANY} fields; at most {MAX_FIELDS}"):
        body.model_validate(Untouched(FIELDS))
