"""Tools and reasoning, as agents use them by OpenAI's client."""

import json
from copy import deepcopy
from typing import Any

import pytest

from runtime.generation.chat_template import render
from runtime.serving.answers.tool_template import ToolTemplate, find_tool_template
from runtime.serving.api.chat_messages import ChatMessage
from tests.builders.plain_answers import TOKENIZER
from tests.builders.serving import RunningServer
from tests.unit.runtime.serving.test_answer_formats import CALLS, FAMILIES, TOOLS, function
from tests.unit.runtime.serving.test_completions import CHAT, HELLO, events, raw, user
from tests.unit.runtime.serving.test_rejections import refused

ANSWER = FAMILIES["qwen3"].text


def ask(server: RunningServer, **more: Any) -> dict[str, Any]:
    return raw(server, CHAT, **{"messages": HELLO, "max_tokens": 400, **more})["choices"][0]


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def test_answer__has_calls_reasoning_and_content(agents, force):
    force(ANSWER)
    choice = ask(agents, tools=TOOLS, logprobs=True)
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("I look it up.", "Let me see.")
    assert calls_of(message) == CALLS
    assert "".join(one["token"] for one in choice["logprobs"]["content"]).strip() == "I look it up."
    assert calls_of(ask(agents, tools=TOOLS, parallel_tool_calls=False)["message"]) == CALLS[:1]
    text = ANSWER.partition("</think>\n\n")[2]
    for fewer in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        choice = ask(agents, **fewer)
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)
        assert "tool_calls" not in choice["message"]


def test_stream__has_the_same_parts(agents, force):
    force(ANSWER)
    chunks = events(agents, CHAT, messages=HELLO, max_tokens=400, tools=TOOLS, n=2)
    for index in range(2):
        choices = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        deltas = [choice["delta"] for choice in choices]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta.get("content") or "" for delta in deltas) == "I look it up."
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Let me see."
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call["index"] for call in calls] == [0, 1]
        assert calls_of({"tool_calls": calls}) == CALLS
        assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "tool_calls")


def test_openais_client__runs_the_loop_of_an_agent(agents, force):
    chats, messages = agents.openai().chat.completions, list[Any](HELLO)
    force(ANSWER, "It is sunny.")
    options: Any = {"model": "tiny", "tools": TOOLS, "max_tokens": 400}
    with chats.stream(messages=messages, **options) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["get_weather", "get_time"]
    # Fields that the client's parser adds.
    echoed = message.model_dump()
    echoed["tool_calls"][0]["function"]["parsed_arguments"] = {"city": "Paris"}
    messages.append(echoed | {"parsed": {"a": 1}})
    sunny = {"role": "tool", "content": "sunny"}
    messages += [{**sunny, "tool_call_id": call.id} for call in message.tool_calls]
    answer = chats.create(messages=messages, **options)
    assert answer.choices[0].message.content == "It is sunny."
    assert answer.choices[0].finish_reason == "stop"
    tokens = raw(agents, "/tokenize", messages=messages, tools=TOOLS)["tokens"]
    prompt = raw(agents, "/detokenize", tokens=tokens)["prompt"]
    assert answer.usage.prompt_tokens == len(tokens)
    assert json.dumps(TOOLS[0]) in prompt
    assert ANSWER in prompt
    assert prompt.count("<tool_response>\nsunny\n</tool_response>") == 2


def test_reasoning_options__reach_the_template(agents, force):
    def prompt(**options: Any) -> str:
        tokens = raw(agents, "/tokenize", messages=HELLO, **options)["tokens"]
        return raw(agents, "/detokenize", tokens=tokens)["prompt"]

    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    assert prompt(**thinking).endswith("assistant\n<think>\n")
    assert prompt(reasoning_effort="none").endswith("assistant\n<think>\n\n</think>\n\n")
    assert prompt(reasoning_effort="none", **thinking).endswith("assistant\n<think>\n")
    assert prompt(reasoning_effort="high").endswith("assistant\n")
    force("Let me see.\n</think>\n\nIt is.")
    message = ask(agents, **thinking)["message"]
    assert (message["content"], message["reasoning_content"]) == ("It is.", "Let me see.")
    cut = ask(agents, **thinking, max_tokens=3)
    assert cut["finish_reason"] == "length"
    assert cut["message"]["content"] in (None, "")
    assert "Let me see.".startswith(cut["message"]["reasoning_content"])


UNIQUE = function("f", strict=True, parameters={"properties": {"a": {"uniqueItems": True}}})
NO_TEXT = {"role": "assistant", "tool_calls": [{"id": "1", **function("f", arguments={})}]}
WRONG: dict[str, dict[str, Any]] = {
    "tools[0].function.name": {"tools": [{"type": "function", "function": {}}]},
    "tools[0].type": {"tools": [{"type": "custom", "function": {"name": "f"}}]},
    "tools[0].function.parameters": {"tools": [function("f", parameters="text")]},
    "tools[1].function.parameters.properties.a": {"tools": [TOOLS[0], UNIQUE]},
    "tool_choice": {"tools": TOOLS, "tool_choice": function("get_wether")},
    "tool_choice.function.name": {"tool_choice": {"type": "function", "function": {}}},
    "messages[0].tool_calls": {"messages": user("a", tool_calls=[{"function": {"name": "f"}}])},
    "messages[0].tool_calls[0].function.arguments": {"messages": [NO_TEXT]},
    "chat_template_kwargs.tokenize": {"chat_template_kwargs": {"tokenize": True}},
    "chat_template_kwargs.chat_template": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
    "chat_template_kwargs": {"chat_template_kwargs": {"text": "\ud800"}},
    "reasoning_effort": {"reasoning_effort": "banana"},
}


@pytest.mark.parametrize("param", WRONG)
def test_wrong_tools__are_named_by_their_path(agents: RunningServer, param: str) -> None:
    assert refused(agents, CHAT, **{"messages": HELLO, **WRONG[param]})["param"] == param


def test_template_without_tools__refuses_them(server: RunningServer) -> None:
    error = refused(server, CHAT, messages=HELLO, tools=TOOLS, max_tokens=1)
    assert error["param"] == "tools"
    assert "chat template has no tools" in error["message"]
    ask(server, tools=TOOLS, tool_choice="none", max_tokens=1)
    called = [*HELLO, {"role": "assistant", "tool_calls": [function("f")]}, *HELLO]
    assert "has no tool calls" in refused(server, CHAT, messages=called)["message"]


TOOLS_PART = "{{ (tools or []) | tojson }}"
EACH = "{% for m in messages %}{{ m.role }}:"
CALL = "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
BEGIN, END = TOOLS_PART + EACH + "{{ m.content }}" + CALL, "{% endfor %}{% endfor %}"
TEMPLATES = {
    BEGIN + "{{ c.function.arguments | tojson }}" + END: ToolTemplate(),
    BEGIN + "{{ c.function.arguments }}" + END: ToolTemplate(takes_text=True),
    BEGIN + "{{ '' + c.function.arguments }}" + END: ToolTemplate(takes_text=True),
    EACH + CALL + "{{ c.function.arguments }}" + END: ToolTemplate(False, takes_text=True),
    EACH + "{{ m.content }}{% endfor %}": ToolTemplate(False, takes_calls=False),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_template__is_tried_for_the_form_of_calls(template: str) -> None:
    tokenizer = deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    form = find_tool_template(tokenizer)
    assert form == TEMPLATES[template]
    call = {"function": {"name": "f", "arguments": '{"a": "b"}'}}
    asked = ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]})
    text = tokenizer.decode(render(form.messages([asked]), tokenizer))
    assert not form.takes_calls or 'f{"a": "b"}' in text
