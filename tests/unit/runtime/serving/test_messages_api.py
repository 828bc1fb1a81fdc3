"""Anthropic's Messages API by its client, whose types validate every answer and event."""

import json
import math
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

from tests.builders.serving import WAIT_SECONDS, RunningServer, running_server, tiny
from tests.unit.runtime.serving.test_answer_formats import CALLS, HERMES_CALL, TOOLS
from tests.unit.runtime.serving.test_completions import HELLO, raw, user
from tests.unit.runtime.serving.test_responses_api import AS_CHAT, ASKED, QUESTION, named_events
from tests.unit.runtime.serving.test_tools import ANSWER

PATH = "/v1/messages"
KEY = "a-key"
CACHED = {"cache_control": {"type": "ephemeral"}}
FLAT_TOOLS: Any = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"], **CACHED}
    for tool in TOOLS
]
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def client(server: RunningServer, key: str = "any") -> anthropic.Anthropic:
    options = {"max_retries": 0, "timeout": WAIT_SECONDS}
    return anthropic.Anthropic(base_url=server.url, api_key=key, **options)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": ASKED, "max_tokens": 400, **fields}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def create(server: RunningServer, **fields: Any) -> Message:
    answer = client(server).messages.with_raw_response.create(**body(**fields))
    Message.model_validate_json(answer.text(), strict=True)
    return answer.parse()


def num_prompt(message: Message) -> int:
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def calls_of(message: Message) -> list[tuple[str, Any]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def test_answer__has_thinking_text_and_calls(agents, force):
    force(ANSWER)
    message = create(agents, tools=FLAT_TOOLS, metadata={"user_id": "a"})
    assert [block.type for block in message.content] == ["thinking", "text", *["tool_use"] * 2]
    thinking, said, *_ = message.content
    assert (thinking.thinking, said.text) == ("Let me see.", "I look it up.")
    assert (calls_of(message), message.stop_reason) == (CALLS, "tool_use")
    tools = [{"type": "web_search_20250305", "name": "web_search"}, *FLAT_TOOLS]
    assert num_prompt(create(agents, tools=tools, max_tokens=1)) == num_prompt(message)
    single = {"type": "auto", "disable_parallel_tool_use": True}
    assert calls_of(create(agents, tools=FLAT_TOOLS, tool_choice=single)) == CALLS[:1]
    none = create(agents, tools=FLAT_TOOLS, tool_choice={"type": "none"})
    assert (calls_of(none), none.stop_reason) == ([], "end_turn")


def test_ends__have_their_reasons(agents, force):
    force("one two three")
    assert create(agents).stop_reason == "end_turn"
    cut = create(agents, max_tokens=1)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 1)
    for sequences in (["banana", "two"], "two"):
        stopped = create(agents, stop_sequences=sequences)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
        assert stopped.content[0].text == "one "
    assert create(agents, stop_sequences="banana").stop_reason == "end_turn"


def test_stream__has_the_official_events(agents, force):
    force(ANSWER)
    events = named_events(agents, PATH, EVENT, **body(tools=FLAT_TOOLS))
    blocks = ["content_block_start", "content_block_stop"] * 4
    kept = [event["type"] for event in events if event["type"] != "content_block_delta"]
    assert kept == ["message_start", *blocks, "message_delta", "message_stop"]
    with client(agents).messages.stream(**body(tools=FLAT_TOOLS)) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content][:2] == ["thinking", "text"]
    assert (message.content[1].text, calls_of(message)) == ("I look it up.", CALLS)
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == events[-2]["usage"]["output_tokens"]


def test_anthropics_client__runs_the_loop_of_an_agent(agents, force):
    messages = user([text(QUESTION)])
    system = [text("x-anthropic-billing-header: cch=12345;"), text("Be brief.") | CACHED]
    options: Any = {"tools": FLAT_TOOLS, "system": system}
    force(ANSWER, "It is sunny.")
    first = create(agents, messages=messages, **options)
    messages.append({"role": "assistant", "content": first.content})
    sunny = {"type": "tool_result", "content": [text("sunny")]}
    used = [block for block in first.content if block.type == "tool_use"]
    results = [{**sunny, "tool_use_id": block.id} for block in used]
    messages += user([*results, text("And "), text("tomorrow?")])
    answer = create(agents, messages=messages, **options)
    assert answer.content[0].text == "It is sunny."
    chat = [*AS_CHAT, *user("And tomorrow?")]
    tokens = raw(agents, "/tokenize", messages=chat, tools=TOOLS)["tokens"]
    assert answer.usage.cache_read_input_tokens > 0
    assert num_prompt(answer) == len(tokens)
    counted = client(agents).messages.count_tokens(model="tiny", messages=messages, **options)
    MessageTokensCount.model_validate(counted.model_dump(), strict=True)
    assert counted.input_tokens == len(tokens)


def test_anthropics_client__runs_tools_by_itself(agents, force):
    @anthropic.beta_tool
    def get_weather(city: str, days: int) -> str:
        return f"{city}: sunny for {days} days"

    force(HERMES_CALL, "It is sunny.")
    run = client(agents).beta.messages.tool_runner(**body(tools=[get_weather]))
    assert [message.content[0].type for message in run] == ["tool_use", "text"]


def test_messages_in_a_row__of_one_role_are_lines_of_one(agents: RunningServer) -> None:
    def count(messages: list[Any]) -> int:
        return raw(agents, f"{PATH}/count_tokens", messages=messages)["input_tokens"]

    given = [*user("What is 2"), *user([text("3 "), text("apples")])]
    assert count(given) == count(user("What is 2\n3 apples"))


def test_thinking__reaches_the_template(agents, force):
    force("Let me see.\n</think>\n\nIt is.")
    message = create(agents, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["thinking", "text"]

    def count(**fields: Any) -> int:
        return raw(agents, f"{PATH}/count_tokens", messages=HELLO, **fields)["input_tokens"]

    assert count(thinking={"type": "disabled"}) > count(thinking={"type": "adaptive"}) > count()
    assert count(output_config={"effort": "max"}) == count()


def refused(server: RunningServer, status: int, **fields: Any) -> tuple[str, str]:
    """The kind and the message of an error, in Anthropic's shape."""
    header = {"Content-Type": "application/json"}
    answer = server.post(PATH, content=json.dumps(fields), headers=header)
    assert answer.status_code == status, answer.text
    ErrorResponse.model_validate(answer.json() | {"request_id": None}, strict=True)
    return answer.json()["error"]["type"], answer.json()["error"]["message"]


WRONG: dict[str, dict[str, Any]] = {
    "messages": {"messages": [*HELLO, {"role": "assistant", "content": "b"}]},
    "messages[0].content[1].type": {"messages": user([text("a"), {"type": "image"}])},
    "messages[0].content[0].tool_use_id": {"messages": user([{"type": "tool_result"}])},
    "max_tokens": {"max_tokens": None},
    "tools[0].name": {"tools": [{"input_schema": {}}]},
    "tools[0].input_schema": {"tools": [{"name": "f", "input_schema": "a"}]},
    "tool_choice.name": {"tools": FLAT_TOOLS, "tool_choice": {"type": "tool"}},
    "stop_sequences[0]": {"stop_sequences": [""]},
    "output_config.format": {"output_config": {"format": ["text"]}},
    "output_config.effort": {"output_config": {"effort": "banana"}},
    "system[0].text": {"system": [{"type": "text"}]},
    "mcp_servers": {"mcp_servers": [{"url": "a"}]},
    "n": {"n": 2},
    "thread": {"thread": {"type": "create"}},
    "messages[0].content": {"messages": user([])},
    "tools[0]": {"tools": [{"name": "f", "input_schema": {"const": math.inf}}]},
}  # fmt: skip


@pytest.mark.parametrize("path", WRONG)
def test_wrong_fields__are_named_by_their_path(agents: RunningServer, path: str) -> None:
    kind, message = refused(agents, 400, **{**body(), **WRONG[path]})
    assert kind == "invalid_request_error"
    assert message.startswith(f"{path}: ")


def test_errors__have_anthropics_shape(folder, monkeypatch):
    with running_server(lambda: tiny(folder), keys=frozenset({KEY})) as server:
        assert refused(server, 401, **body())[0] == "authentication_error"
        good = client(server, KEY)
        assert good.messages.create(**body(max_tokens=1)).usage.output_tokens == 1
        token = anthropic.Anthropic(base_url=server.url, auth_token=KEY, api_key=None)
        assert token.messages.create(**body(max_tokens=1)).usage.output_tokens == 1
        with pytest.raises(anthropic.AuthenticationError, match="invalid API key"):
            client(server, "wrong").messages.create(**body())
        with pytest.raises(anthropic.NotFoundError, match="unknown model"):
            good.messages.create(**body() | {"model": "another"})
        with pytest.raises(anthropic.NotFoundError, match="this server has POST"):
            good.messages.batches.list()
        monkeypatch.setattr("runtime.serving.choice.make_logits_processors", lambda *_, **__: 1 / 0)
        with pytest.raises(anthropic.InternalServerError, match="api_error"):
            good.messages.create(**body())
        failing = good.messages.stream(**body())
        with pytest.raises(anthropic.APIStatusError, match="api_error"), failing as stream:
            stream.until_done()
