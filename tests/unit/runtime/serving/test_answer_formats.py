"""Each family's text becomes content, reasoning and calls, however it is cut into pieces."""

import json
import re
from dataclasses import dataclass, field
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
PROPERTIES = {
    "get_weather": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "get_time": {"zone": {"type": "string"}},
}


def function(name: str, **more: Any) -> dict[str, Any]:
    """A tool."""
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = [
    function(name, parameters={"type": "object", "properties": properties})
    for name, properties in PROPERTIES.items()
]
WEATHER_JSON, TIME_JSON = json.dumps(WEATHER), json.dumps(TIME)
WEATHER_CALL = json.dumps({"name": "get_weather", "arguments": WEATHER})
TIME_CALL = json.dumps({"name": "get_time", "arguments": TIME})


@dataclass(frozen=True)
class Family:
    template: str
    """What its chat template has."""
    text: str
    """What the model writes."""
    prefix: str = ""
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=lambda: CALLS)


BOTH: Any = {"content": "I look it up.", "reasoning": "Let me see."}
HERMES = "<tool_call> <think>"
HARMONY = "<|channel|>"
FAMILIES = {
    "qwen3": Family(
        HERMES,
        "<think>\nLet me see.\n</think>\n\nI look it up.\n"
        f"<tool_call>\n{WEATHER_CALL}\n</tool_call>\n<tool_call>\n{TIME_CALL}\n</tool_call>",
        **BOTH,
    ),
    "qwen3-thinking, whose prompt begins the reasoning": Family(
        HERMES,
        f"Let me see.\n</think>\n\n<tool_call>\n{WEATHER_CALL}\n</tool_call>\n",
        prefix="<think>",
        reasoning="Let me see.",
        calls=CALLS[:1],
    ),
    "qwen3-coder": Family(
        "<tool_call> <function= <parameter=",
        "I look it up.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"
        "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=get_time>\n<parameter=zone>\nEurope/Rome\n</parameter>\n</function>\n</tool_call>",
        content="I look it up.",
    ),
    "glm": Family(
        "<tool_call> <arg_key> <think>",
        "\n<think>Let me see.</think>\nI look it up.\n<tool_call>get_weather\n"
        "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
        "\n<tool_call>get_time\n<arg_key>zone</arg_key>\n<arg_value>Europe/Rome</arg_value>\n"
        "</tool_call>",
        **BOTH,
    ),
    "minimax": Family(
        "<minimax:tool_call> <think>",
        '<think>\nLet me see.\n</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Paris</parameter>\n<parameter name="days">3</parameter>\n'
        '</invoke>\n<invoke name="get_time">\n<parameter name="zone">Europe/Rome</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        reasoning="Let me see.",
    ),
    "deepseek-v3": Family(
        "<｜tool▁call▁begin｜> ```json",
        "I look it up.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        f"get_weather\n```json\n{WEATHER_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        f"get_time\n```json\n{TIME_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        content="I look it up.",
    ),
    "deepseek-v3.1": Family(
        "<｜tool▁call▁begin｜> <think>",
        "Let me see.</think>I look it up.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather"
        f"<｜tool▁sep｜>{WEATHER_JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>"
        f"{TIME_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        prefix="<think>",
        **BOTH,
    ),
    "kimi": Family(
        "<|tool_call_argument_begin|>",
        "I look it up.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{WEATHER_JSON}<|tool_call_end|><|tool_call_begin|>"
        f"functions.get_time:1<|tool_call_argument_begin|>{TIME_JSON}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        content="I look it up.",
    ),
    "gpt-oss": Family(
        HARMONY,
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look it up.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{WEATHER_JSON}",
        **BOTH,
        calls=CALLS[:1],
    ),
    "gpt-oss, with the recipient before the channel": Family(
        HARMONY,
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant to=functions.get_time"
        f"<|channel|>commentary json<|message|>{TIME_JSON}",
        reasoning="Let me see.",
        calls=CALLS[1:],
    ),
    "gpt-oss, without a call": Family(
        HARMONY,
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final"
        "<|message|>It is\n\n sunny. ",
        content="It is\n\n sunny. ",
        reasoning="Let me see.",
        calls=[],
    ),
    "mistral, version 11": Family(
        "[TOOL_CALLS] [ARGS] [THINK]",
        f"[THINK]Let me see.[/THINK]I look it up.[TOOL_CALLS]get_weather[ARGS]{WEATHER_JSON}"
        f"[TOOL_CALLS]get_time[ARGS]{TIME_JSON}",
        **BOTH,
    ),
    "mistral": Family("[TOOL_CALLS]", f"[TOOL_CALLS] [{WEATHER_CALL}, {TIME_CALL}]"),
    "llama": Family(
        '"parameters"', json.dumps({"name": "get_weather", "parameters": WEATHER}), calls=CALLS[:1]
    ),
    "plain text": Family(
        HERMES, " A <b>bold</b> claim <\n\n", content=" A <b>bold</b> claim <\n\n", calls=[]
    ),
    "a call that is no JSON": Family(
        HERMES,
        'Well. <tool_call>\n{"name": get}\n</tool_call>',
        content='Well. <tool_call>\n{"name": get}\n</tool_call>',
        calls=[],
    ),
    "a call that the limit cut short": Family(
        HERMES, '<tool_call>\n{"name": "get_wea', content='<tool_call>\n{"name": "get_wea', calls=[]
    ),
    "reasoning that the limit cut short": Family(
        HERMES, "<think>\nLet me", reasoning="Let me", calls=[]
    ),
}


def format_of(template: str, *, special: Any = None, **more: Any) -> AnswerFormat:
    tokenizer: Any = SimpleNamespace(chat_template=template, **more)
    found = find_answer_format(tokenizer, special or {})
    assert found is not None
    return found


def read(
    form: AnswerFormat,
    text: str,
    size: int,
    *,
    prefix: str = "",
    tools: list[dict[str, Any]] = TOOLS,
    reason: FinishReason = FinishReason.STOP,
) -> tuple[OutputDelta, list[OutputDelta]]:
    """The whole of an answer in pieces of this size, and what each piece added."""
    reader = AnswerReader(AnswerParser(form.parser(prefix, tools)))
    events: list[ChoiceEvent] = [
        TokenDelta(text=text[i : i + size], token=i, offset=i, logprob=TokenLogprob(i, -1.0))
        for i in range(0, len(text), size)
    ]
    deltas = [reader.read([event]) for event in [*events, reason]]
    whole = OutputDelta(
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        calls=[call for delta in deltas for call in delta.calls],
        tokens=[token for delta in deltas for token in delta.tokens],
        finish_reason=deltas[-1].finish_reason,
    )
    return whole, deltas


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
@pytest.mark.parametrize("name", FAMILIES)
def test_answer__becomes_its_parts(name: str, size: int) -> None:
    family = FAMILIES[name]
    form = format_of(family.template)
    whole, deltas = read(form, family.text, size, prefix=family.prefix)
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == family.calls
    assert (whole.text, whole.reasoning) == (family.content, family.reasoning)
    assert len({call.id for call in whole.calls}) == len(whole.calls)
    assert whole.finish_reason == ("tool_calls" if family.calls else "stop")
    if size == 1:
        # Spaces around marks are not in the log-probabilities either.
        for delta in deltas:
            assert "".join(token.text for token in delta.tokens) == delta.text


def test_tools_that_are_not_offered__are_not_called() -> None:
    text = f"So: <tool_call>\n{WEATHER_CALL}\n</tool_call>"
    whole, _ = read(format_of(HERMES), text, 3, tools=[])
    assert (whole.text, whole.calls, whole.finish_reason) == (text, [], "stop")


def test_stream__has_text_at_once_and_calls_when_they_end() -> None:
    text = FAMILIES["qwen3"].text
    _, deltas = read(format_of(HERMES), text, 1, reason=FinishReason.LENGTH)
    first = text.index("Let me")
    assert "".join(delta.reasoning for delta in deltas[first : first + 3]) == "Let"
    called = [i for i, delta in enumerate(deltas) if delta.calls]
    ends = [match.end() for match in re.finditer("</tool_call>", text)]
    assert [i + 1 for i in called] == ends
    assert deltas[-1].finish_reason == "length"


OWN = {
    "start_anchor": "<assistant>",
    "fields": {
        "thinking": {"open": "(", "close": ")", "content": "text"},
        "tool_calls": {
            "open_pattern": r"CALL (?P<name>\w+) ",
            "close": ";",
            "content": "json",
            "repeats": True,
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
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
    tokenizer: Any = SimpleNamespace(chat_template="{{ messages }}")
    assert find_answer_format(tokenizer, {}) is None
