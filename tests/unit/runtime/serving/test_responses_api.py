"""The Responses API by OpenAI's client, whose types validate every answer and event."""

import json
from itertools import groupby
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.builders.serving import RunningServer
from tests.unit.runtime.serving.test_answer_formats import CALLS, TOOLS
from tests.unit.runtime.serving.test_completions import raw, user
from tests.unit.runtime.serving.test_rejections import refused
from tests.unit.runtime.serving.test_tools import ANSWER

PATH = "/v1/responses"
FLAT_TOOLS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
QUESTION = "What is the weather in Paris?"
ASKED: list[Any] = user(QUESTION)
MADE_CALLS = [
    {"id": name, "function": {"name": name, "arguments": json.dumps(arguments)}}
    for name, arguments in CALLS
]
SAID = {"content": "I look it up.", "reasoning_content": "Let me see.", "tool_calls": MADE_CALLS}
AS_CHAT = [
    {"role": "system", "content": "Be brief."},
    *ASKED,
    {"role": "assistant", **SAID},
    *({"role": "tool", "tool_call_id": name, "content": "sunny"} for name, _ in CALLS),
]
"""The conversation of an agent's loop as a chat."""


def create(server: RunningServer, **fields: Any) -> Response:
    body = {"model": "tiny", "input": QUESTION, "max_output_tokens": 400, **fields}
    answer = server.openai().responses.with_raw_response.create(**body)
    Response.model_validate_json(answer.text, strict=True)
    return answer.parse()


def named_events(server: RunningServer, path: str, kind: TypeAdapter, **body: Any) -> list[Any]:
    """The events of a stream, each of which is of the kind and has its type's name."""
    events = []
    for lines in server.post(path, json={**body, "stream": True}).text.strip().split("\n\n"):
        name, data = lines.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        kind.validate_python(events[-1], strict=True)
        assert name == f"event: {events[-1]['type']}"
    return events


def calls_of(output: list[Any]) -> list[tuple[str, Any]]:
    calls = [item for item in output if item.type == "function_call"]
    return [(call.name, json.loads(call.arguments)) for call in calls]


def test_answer__has_reasoning_text_and_calls(agents, force):
    force(ANSWER)
    response = create(agents, tools=FLAT_TOOLS, instructions="Be brief.", temperature=0.5)
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in response.output] == kinds
    assert response.output[0].content[0].text == "Let me see."
    assert (response.status, response.output_text) == ("completed", "I look it up.")
    assert calls_of(response.output) == CALLS
    assert (response.temperature, response.tools[0].name) == (0.5, "get_weather")
    usage = response.usage
    assert usage.input_tokens + usage.output_tokens == usage.total_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    tools = [{"type": "web_search"}, *FLAT_TOOLS]
    more = create(agents, tools=tools, instructions="Be brief.", max_output_tokens=1)
    assert more.usage.input_tokens == usage.input_tokens
    assert calls_of(create(agents, tools=FLAT_TOOLS, parallel_tool_calls=False).output) == CALLS[:1]
    assert not calls_of(create(agents, tools=FLAT_TOOLS, tool_choice="none").output)


def test_answer__that_is_cut_is_incomplete(agents: RunningServer) -> None:
    response = create(agents, max_output_tokens=3, temperature=0)
    assert response.status == response.output[-1].status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    chat = raw(agents, "/v1/chat/completions", messages=ASKED, max_tokens=3, temperature=0)
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]
    *_, last = named_events(agents, PATH, EVENT, input=QUESTION, max_output_tokens=3)
    assert last["type"] == "response.incomplete"


PART = "output_item.added content_part.added {0}.delta {0}.done content_part.done output_item.done"
CALL = "output_item.added {0}.delta {0}.done output_item.done"
"""Events of an item, whose equal neighbours are one."""


def test_stream__has_the_official_events(agents, force):
    force(ANSWER)
    asked: Any = {"input": QUESTION, "max_output_tokens": 400, "tools": FLAT_TOOLS}
    events = named_events(agents, PATH, EVENT, **asked)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [name.removeprefix("response.") for name, _ in groupby(e["type"] for e in events)]
    items = [PART.format("reasoning_text"), PART.format("output_text")]
    items += [CALL.format("function_call_arguments")] * 2
    assert names == ["created", "in_progress", *" ".join(items).split(), "completed"]
    with agents.openai().responses.stream(model="tiny", **asked) as stream:
        response = stream.get_final_response()
    assert (response.output_text, calls_of(response.output)) == ("I look it up.", CALLS)
    assert response.usage.output_tokens == events[-1]["response"]["usage"]["output_tokens"]


def test_openais_client__runs_the_loop_of_an_agent(agents, force):
    items, options = [*ASKED], {"tools": FLAT_TOOLS, "instructions": "Be brief."}
    force(ANSWER, "It is sunny.")
    first = create(agents, input=items, **options)
    items += [item.model_dump() for item in first.output]
    sunny = {"type": "function_call_output", "output": "sunny"}
    calls = [item for item in first.output if item.type == "function_call"]
    items += [{**sunny, "call_id": item.call_id} for item in calls]
    response = create(agents, input=items, **options)
    assert response.output_text == "It is sunny."
    # The prompt is that of the same conversation as a chat.
    tokens = raw(agents, "/tokenize", messages=AS_CHAT, tools=TOOLS)["tokens"]
    assert response.usage.input_tokens == len(tokens)


def test_storage__is_refused_in_words(agents: RunningServer) -> None:
    response = create(agents, max_output_tokens=1, store=True, metadata={"a": "b"})
    assert response.model_extra["store"] is False
    with pytest.raises(openai.BadRequestError, match="keeps no responses; send the whole") as no:
        create(agents, previous_response_id=response.id)
    assert no.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError, match="/v1/responses"):
        agents.openai().responses.retrieve(response.id)


def test_failure__is_an_event(agents: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.serving.choice.make_logits_processors", lambda *_, **__: 1 / 0)
    events = named_events(agents, PATH, EVENT, input="a", max_output_tokens=4)
    assert [e["type"] for e in events[-2:]] == ["error", "response.failed"]


WRONG: dict[str, dict[str, Any]] = {
    "input": {"input": None},
    "input[0].content": {"input": [{"role": "user"}]},
    "input[0].role": {"input": [{"role": "tool", "content": "a"}]},
    "input[0].content[0].type": {"input": user([{"type": "input_image", "image_url": "data:"}])},
    "input[1].type": {"input": [*user("a"), {"type": "item_reference"}]},
    "input[0].call_id": {"input": [{"type": "function_call_output", "output": "a"}]},
    "tools[0].name": {"tools": [{"type": "function", "parameters": {}}]},
    "tools[0].parameters": {"tools": [{"type": "function", "name": "f", "parameters": "a"}]},
    "tool_choice.name": {"tools": FLAT_TOOLS, "tool_choice": {"type": "function"}},
    "tool_choice": {"tool_choice": 1},
    "text.format": {"text": {"format": "text"}},
    "reasoning.effort": {"reasoning": {"effort": "banana"}},
    "max_output_tokens": {"max_output_tokens": 0},
    "background": {"background": True},
    "banana": {"banana": 1},
}


@pytest.mark.parametrize("param", WRONG)
def test_wrong_fields__are_named_by_their_path(agents: RunningServer, param: str) -> None:
    assert refused(agents, PATH, **{"input": QUESTION, **WRONG[param]})["param"] == param


def test_context_that_is_too_long__is_the_inputs_fault(agents: RunningServer) -> None:
    error = refused(agents, PATH, input="word " * 3000)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert "context length is 2048" in error["message"]
