"""Each family's text becomes content, reasoning and calls, however it is cut into pieces."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.generation.sampling import TokenLogprob
from runtime.serving.answers.answer_formats import AnswerFormat, find_answer_format
from runtime.serving.answers.answer_parser import AnswerParser, AnswerReader, OutputDelta
from runtime.serving.choice import ChoiceEvent, FinishReason, TokenDelta

WEATHER = {"city": "Paris", "days": 3}
TIME = {"zone": "Europe/Rome"}
CALLS = [("get_weather", WEATHER), ("get_time", TIME)]
WEATHER_TYPES = {"city": {"type": "string"}, "days": {"type": "integer"}}
PROPERTIES = {"get_weather": WEATHER_TYPES, "get_time": {"zone": {"type": "string"}}}


def function(name: str, **more: Any) -> dict[str, Any]:
    """A tool."""
    return {"type": "function", "function": {"name": name, **more}}


def closed_object(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object of these properties and no others."""
    closed = {"type": "object", "additionalProperties": False}
    return {**closed, "properties": properties, "required": [*properties]}


TOOLS = [
    function(name, parameters={"type": "object", "properties": properties})
    for name, properties in PROPERTIES.items()
]
WEATHER_JSON, TIME_JSON = json.dumps(WEATHER), json.dumps(TIME)
WEATHER_CALL = json.dumps({"name": "get_weather", "arguments": WEATHER})
TIME_CALL = json.dumps({"name": "get_time", "arguments": TIME})
HERMES_CALL = f"<tool_call>\n{WEATHER_CALL}\n</tool_call>"
HERMES = "<tool_call> <think>"
CONTENT, REASONING = "I look it up.", "Let me see."


class Family:
    """What the model writes, what its chat template has, and what the text has to become.

    Unless something else is given, that is whatever it has of `CONTENT`, `REASONING` and `CALLS`.
    """

    def __init__(self, text: str, template=HERMES, *, prefix="", content=None, reasoning=""):
        self.text, self.template, self.prefix = text, template, prefix
        self.content = CONTENT * (CONTENT in text) if content is None else content
        self.reasoning = reasoning or REASONING * (REASONING in text)
        self.calls = [(name, arguments) for name, arguments in CALLS if name in text]


START = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
FAMILIES = {
    "qwen3": Family(
        "<think>\nLet me see.\n</think>\n\nI look it up.\n"
        f"{HERMES_CALL}\n<tool_call>\n{TIME_CALL}\n</tool_call>"
    ),
    "qwen3-thinking, whose prompt begins the reasoning": Family(
        f"Let me see.\n</think>\n\n{HERMES_CALL}\n", prefix="<think>"
    ),
    "qwen3-coder": Family(
        "I look it up.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"
        "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=get_time>\n<parameter=zone>\nEurope/Rome\n</parameter>\n</function>\n</tool_call>",
        "<tool_call> <function= <parameter=",
    ),
    "glm": Family(
        "\n<think>Let me see.</think>\nI look it up.\n<tool_call>get_weather\n"
        "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
        "\n<tool_call>get_time\n<arg_key>zone</arg_key>\n<arg_value>Europe/Rome</arg_value>\n"
        "</tool_call>",
        "<tool_call> <arg_key> <think>",
    ),
    "minimax": Family(
        '<think>\nLet me see.\n</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Paris</parameter>\n<parameter name="days">3</parameter>\n'
        '</invoke>\n<invoke name="get_time">\n<parameter name="zone">Europe/Rome</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        "<minimax:tool_call> <think>",
    ),
    "deepseek-v3": Family(
        "I look it up.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        f"get_weather\n```json\n{WEATHER_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        f"get_time\n```json\n{TIME_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜> ```json",
    ),
    "deepseek-v3.1": Family(
        "Let me see.</think>I look it up.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather"
        f"<｜tool▁sep｜>{WEATHER_JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>"
        f"{TIME_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜> <think>",
        prefix="<think>",
    ),
    "kimi": Family(
        "I look it up.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{WEATHER_JSON}<|tool_call_end|><|tool_call_begin|>"
        f"functions.get_time:1<|tool_call_argument_begin|>{TIME_JSON}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "<|tool_call_argument_begin|>",
    ),
    "gpt-oss": Family(
        f"{START}<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant<|channel|>"
        f"commentary to=functions.get_weather <|constrain|>json<|message|>{WEATHER_JSON}",
        "<|channel|>",
    ),
    "gpt-oss, with the recipient before the channel": Family(
        f"{START} to=functions.get_time<|channel|>commentary json<|message|>{TIME_JSON}",
        "<|channel|>",
    ),
    "gpt-oss, without a call": Family(
        f"{START}<|channel|>final<|message|>It is\n\n sunny. ",
        "<|channel|>",
        content="It is\n\n sunny. ",
    ),
    "mistral, version 11": Family(
        f"[THINK]Let me see.[/THINK]I look it up.[TOOL_CALLS]get_weather[ARGS]{WEATHER_JSON}"
        f"[TOOL_CALLS]get_time[ARGS]{TIME_JSON}",
        "[TOOL_CALLS] [ARGS] [THINK]",
    ),
    "mistral": Family(f"[TOOL_CALLS] [{WEATHER_CALL}, {TIME_CALL}]", "[TOOL_CALLS]"),
    "llama": Family(json.dumps({"name": "get_weather", "parameters": WEATHER}), '"parameters"'),
    "calls between lines of content": Family(
        f"Both.\n{HERMES_CALL}\nNow.\n\n{HERMES_CALL.replace(WEATHER_CALL, TIME_CALL)}\nDone.",
        content="Both.\nNow.\nDone.",
    ),
    "reasoning, twice": Family(
        "<think>Let me </think>\n<think>see.</think> I look it up.", reasoning="Let mesee."
    ),
    "reasoning that the limit cut short": Family("<think>\nLet me", reasoning="Let me"),
}
UNREAD = {
    "plain text": " A <b>bold</b> claim <\n\n",
    "a call that is no JSON": 'Well. <tool_call>\n{"name": get}\n</tool_call>',
    "a call that the limit cut short": '<tool_call>\n{"name": "get_wea',
    "a call with a number that JSON lacks": (
        '<tool_call>{"name": "f", "arguments": {"zone": NaN}}</tool_call>'
    ),
    "marks of reasoning as a subject": "Write <think> first, then </think>. Good luck.",
}
"""Texts that stay content."""
FAMILIES |= {name: Family(text, content=text) for name, text in UNREAD.items()}


def format_of(template: str, *, special: Any = None, **more: Any) -> AnswerFormat:
    found = find_answer_format(SimpleNamespace(chat_template=template, **more), special or {})
    assert found is not None
    return found


def read(
    form: AnswerFormat, text: str, size: int, *, prefix="", tools=TOOLS, reason=FinishReason.STOP
) -> tuple[OutputDelta, list[OutputDelta]]:
    """The whole of an answer in pieces of this size, and what each piece added."""
    reader = AnswerReader(AnswerParser(form.parser(prefix, tools)))
    events: list[ChoiceEvent] = [
        TokenDelta(text=text[i : i + size], token=i, offset=i, logprob=TokenLogprob(i, -1.0))
        for i in range(0, len(text), size)
    ]
    deltas = [reader.read([event]) for event in [*events, reason]]
    whole = OutputDelta(finish_reason=deltas[-1].finish_reason)
    for delta in deltas:
        whole.text += delta.text
        whole.reasoning += delta.reasoning
        whole.calls += delta.calls
    return whole, deltas


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
@pytest.mark.parametrize("name", FAMILIES)
def test_answer__becomes_its_parts(name: str, size: int) -> None:
    family = FAMILIES[name]
    whole, deltas = read(format_of(family.template), family.text, size, prefix=family.prefix)
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == family.calls
    assert (whole.text, whole.reasoning) == (family.content, family.reasoning)
    assert len({call.id for call in whole.calls}) == len(whole.calls)
    assert whole.finish_reason == ("tool_calls" if family.calls else "stop")
    if size == 1:
        # Spaces around marks, and the line's end in their place, are not in the log-probabilities.
        for delta in deltas:
            shown = "".join(token.text for token in delta.tokens)
            assert shown in (delta.text, delta.text.removeprefix("\n"))


def test_tools_that_are_not_offered__are_not_called() -> None:
    text = f"So: {HERMES_CALL}"
    whole, _ = read(format_of(HERMES), text, 3, tools=[])
    assert (whole.text, whole.calls, whole.finish_reason) == (text, [], "stop")


def test_stream__has_text_at_once_and_calls_when_they_end() -> None:
    text = FAMILIES["qwen3"].text
    _, deltas = read(format_of(HERMES), text, 1, reason=FinishReason.LENGTH)
    first = text.index("Let me")
    assert "".join(delta.reasoning for delta in deltas[first : first + 3]) == "Let"
    called = [i for i, delta in enumerate(deltas) if delta.calls]
    assert [i + 1 for i in called] == [match.end() for match in re.finditer("</tool_call>", text)]
    assert deltas[-1].finish_reason == "length"


NAMED = {"function": {"name": "{name}", "arguments": "{content}"}}
JSON_CALL = {"close": ";", "content": "json", "repeats": True, "transform": NAMED}
OWN: dict[str, Any] = {
    "start_anchor": "<assistant>",
    "fields": {
        "thinking": {"open": "(", "close": ")", "content": "text"},
        "tool_calls": {"open_pattern": r"CALL (?P<name>\w+) ", **JSON_CALL},
        "content": {"content": "text"},
    },
}


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_tokenizers_own_template__counts_first(size: int) -> None:
    form = format_of(HERMES, response_template=OWN)
    assert form.has_reasoning
    text = f"I see.) I look it up. CALL get_weather {WEATHER_JSON};"
    output, _ = read(form, text, size, prefix="<user>?<assistant>(")
    assert (output.text, output.reasoning) == ("I look it up.", "I see.")
    assert [(call.name, json.loads(call.arguments)) for call in output.calls] == CALLS[:1]
    text = "So CALL f {;x"
    rest, _ = read(form, text, size)
    assert (rest.text, rest.calls) == (text, [])


def test_models_without_either__have_no_format() -> None:
    assert find_answer_format(SimpleNamespace(chat_template="{{ messages }}"), {}) is None
