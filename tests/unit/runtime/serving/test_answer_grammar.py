"""Each family's grammar takes the calls that the parser of its answers reads, and no others."""

import json
import re
from functools import partial
from typing import Any

import llguidance
import pytest

from runtime.serving.answers.answer_formats import AnswerFormat
from runtime.serving.answers.answer_parser import AnswerParser
from runtime.serving.api.answer_grammar import chat_grammar
from runtime.serving.api.schemas import ChatRequest
from runtime.serving.errors import RequestError
from tests.builders.plain_answers import TOKENIZER, model_info
from tests.unit.runtime.serving import test_answer_formats as formats
from tests.unit.runtime.serving.test_answer_formats import FAMILIES, OWN, TOOLS, WEATHER_JSON

MARK = re.compile(r"<[|｜][^>]+>|\[/?[A-Z_]+\]")
MARKS = sorted({mark for family in FAMILIES.values() for mark in MARK.findall(family.text)})
SPECIAL = {name: len(TOKENIZER) + number for number, name in enumerate(MARKS)}
CLOSED = {"type": "object", "additionalProperties": False}
STRICT = [
    formats.function(
        name, strict=True, parameters={**CLOSED, "properties": known, "required": list(known)}
    )
    for name, known in formats.PROPERTIES.items()
]
WITH_JSON = {
    "deepseek-v3", "deepseek-v3.1", "gpt-oss", "kimi", "llama", "mistral", "mistral, version 11",
    "qwen3", "qwen3-thinking, whose prompt begins the reasoning",
}  # fmt: skip
REMARK = "<|channel|>commentary<|message|><|end|><|start|>assistant"
WITH_TAGS = {"glm", "minimax", "qwen3-coder"}
format_of = partial(formats.format_of, special=SPECIAL)


def tokens_of(text: str) -> list[int]:
    tokens = []
    for piece in re.split(f"({MARK.pattern})", text):
        tokens += [SPECIAL[piece]] if piece in SPECIAL else TOKENIZER.encode(piece)
    return tokens


def takes(form: AnswerFormat, prefix: str, text: str, **body: Any) -> tuple[bool, bool]:
    """Whether the grammar takes all of a text, and whether it may end there."""
    model = model_info(answer_format=form, special_tokens=SPECIAL, vocab_size=8300)
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "?"}], **body})
    grammar = chat_grammar(chat, model, prefix)
    assert grammar is not None
    matcher = grammar.matcher
    assert isinstance(matcher, llguidance.LLMatcher)
    matcher.reset()
    tokens = tokens_of(text)
    return matcher.try_consume_tokens(tokens) == len(tokens), matcher.is_accepting()


@pytest.mark.parametrize("name", sorted(WITH_JSON))
def test_calls__of_the_familys_text_are_taken(name: str) -> None:
    family = FAMILIES[name]
    form, text = format_of(family.template), family.text.rstrip()
    auto = {"tools": STRICT, "tool_choice": "auto"}
    assert takes(form, family.prefix, text, **auto) == (True, True)
    wrong = text.replace('"days"', '"weeks"').replace('"zone"', '"place"')
    assert takes(form, family.prefix, wrong, **auto)[0] is False
    required = text.replace(family.content, "") if family.content else text
    required = required.replace(REMARK, "")
    assert takes(form, family.prefix, required, tools=TOOLS, tool_choice="required") == (True, True)
    if family.content:
        taken = takes(form, family.prefix, text, tools=TOOLS, tool_choice="required")
        assert taken[0] is False


@pytest.mark.parametrize("name", sorted(WITH_TAGS))
def test_arguments_that_are_no_json__are_refused_with_the_reason(name: str) -> None:
    form = format_of(FAMILIES[name].template)
    with pytest.raises(RequestError, match="tool_choice: .* arguments that are no JSON") as caught:
        takes(form, "", "", tools=TOOLS, tool_choice="required")
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss, without a call", "deepseek-v3.1", "kimi"])
def test_content__follows_the_schema_after_the_reasoning(name: str) -> None:
    family = FAMILIES[name]
    form = format_of(family.template)
    head = {
        "qwen3": "<think>\nLet me see.\n</think>\n\n",
        "gpt-oss, without a call": (
            "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>"
        ),
        "deepseek-v3.1": "Let me see.</think>",
        "kimi": "",
    }[name]
    body = {"response_format": {"type": "json_object"}}
    assert takes(form, family.prefix, head + '{"a": [1]}', **body) == (True, True)
    assert takes(form, family.prefix, head + "[1]", **body)[0] is False
    assert takes(form, family.prefix, head, **body) == (True, False)


def test_tokenizers_own_template__is_followed_where_its_marks_are_texts() -> None:
    template = {**OWN, "fields": {**OWN["fields"]}}
    form = format_of("", response_template=template)
    body = {"response_format": {"type": "json_object"}}
    assert takes(form, "<assistant>", '(Hm.){"a": 1}', **body) == (True, True)
    with pytest.raises(RequestError, match="have a form that no grammar can follow"):
        takes(form, "<assistant>", "", tools=TOOLS, tool_choice="required")
    template["fields"]["thinking"] = {"open_pattern": "x+", "close": ")", "content": "text"}
    with pytest.raises(RequestError, match="by patterns, which no grammar can follow"):
        takes(format_of("", response_template=template), "<assistant>", "", **body)
    # A template that reads what the family writes.
    hermes = {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True}
    fields = {"tool_calls": {**hermes, "transform": {"function": "{content}"}}, "content": {}}
    own = {"start_anchor": "<assistant>", "fields": fields}
    fields["content"] = {"content": "text"}
    form = format_of("<tool_call>", response_template=own)
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER_JSON}}}\n</tool_call>'
    taken = takes(form, "<assistant>", text, tools=TOOLS, tool_choice="required")
    assert taken == (True, True)


def test_names__that_the_format_cannot_have_are_refused() -> None:
    form = format_of(FAMILIES["kimi"].template)
    tool = formats.function("a:b")
    with pytest.raises(RequestError, match="calls of 'a:b' have a form that no grammar"):
        takes(form, "", "", tools=[tool], tool_choice="required")
    quoted = formats.function('say "hi"')
    text = '<tool_call>\n{"name": "say \\"hi\\"", "arguments": {}}\n</tool_call>'
    hermes = format_of("<tool_call>")
    assert takes(hermes, "", text, tools=[quoted], tool_choice="required") == (True, True)
    parser = AnswerParser(hermes.parser("", [quoted]))
    pieces = [*parser.push(text), *parser.end()]
    assert [piece.call and piece.call.name for piece in pieces] == ['say "hi"']


def test_single_calls__end_the_answer() -> None:
    form = format_of(FAMILIES["qwen3"].template)
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER_JSON}}}\n</tool_call>'
    two = f"{call}\n{call}"
    named = formats.function("get_weather")
    for body, expected in (
        ({"tool_choice": "required"}, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, False),
        ({"tool_choice": named}, False),
    ):
        assert takes(form, "", call, tools=TOOLS, **body) == (True, True)
        assert takes(form, "", two, tools=TOOLS, **body)[0] is expected
    other = json.dumps({"name": "get_time", "arguments": {}})
    text = f"<tool_call>\n{other}\n</tool_call>"
    assert takes(form, "", text, tools=TOOLS, tool_choice=named)[0] is False
