"""Each family's grammar takes the calls that the parser of its answers reads, and no others."""

import re
from functools import partial
from typing import Any

import pytest

from runtime.serving.answers.answer_parser import AnswerParser
from runtime.serving.api.answer_grammar import chat_grammar
from runtime.serving.api.schemas import ChatRequest
from runtime.serving.errors import RequestError
from tests.builders.plain_answers import TOKENIZER, model_info
from tests.unit.runtime.serving import test_answer_formats as formats
from tests.unit.runtime.serving.test_answer_formats import FAMILIES, HERMES_CALL, OWN, TOOLS

MARK = re.compile(r"<[|｜][^>]+>|\[/?[A-Z_]+\]")
MARKS = sorted({mark for family in FAMILIES.values() for mark in MARK.findall(family.text)})
SPECIAL = {name: len(TOKENIZER) + number for number, name in enumerate(MARKS)}
STRICT = [
    formats.function(name, strict=True, parameters=formats.closed_object(known))
    for name, known in formats.PROPERTIES.items()
]
WITH_JSON = {
    "deepseek-v3", "deepseek-v3.1", "gpt-oss", "kimi", "llama", "mistral", "mistral, version 11",
    "qwen3", "qwen3-thinking, whose prompt begins the reasoning",
}  # fmt: skip
REQUIRED: Any = {"tools": TOOLS, "tool_choice": "required"}
REMARK = "<|channel|>commentary<|message|><|end|><|start|>assistant"
format_of = partial(formats.format_of, special=SPECIAL)


def tokens_of(text: str) -> list[int]:
    tokens = []
    for piece in re.split(f"({MARK.pattern})", text):
        tokens += [SPECIAL[piece]] if piece in SPECIAL else TOKENIZER.encode(piece)
    return tokens


def takes(form: Any, prefix: str, text: str, **body: Any) -> tuple[bool, bool]:
    """Whether the grammar takes all of a text, and whether it may end there."""
    model = model_info(answer_format=form, special_tokens=SPECIAL, vocab_size=8300)
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "?"}], **body})
    grammar = chat_grammar(chat, model, prefix)
    assert grammar is not None
    matcher = grammar.matcher
    matcher.reset()
    tokens = tokens_of(text)
    return matcher.try_consume_tokens(tokens) == len(tokens), matcher.is_accepting()


@pytest.mark.parametrize("name", sorted(WITH_JSON))
def test_calls__of_the_familys_text_are_taken(name: str) -> None:
    family = FAMILIES[name]
    text, taken = family.text.rstrip(), partial(takes, format_of(family.template), family.prefix)
    auto: Any = {"tools": STRICT, "tool_choice": "auto"}
    assert taken(text, **auto) == (True, True)
    assert taken(text.replace('"days"', '"weeks"').replace('"zone"', '"place"'), **auto)[0] is False
    calls = text.replace(family.content, "") if family.content else text
    assert taken(calls.replace(REMARK, ""), **REQUIRED) == (True, True)
    assert not family.content or taken(text, **REQUIRED)[0] is False


@pytest.mark.parametrize("name", ["glm", "minimax", "qwen3-coder"])
def test_arguments_that_are_no_json__are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(RequestError, match="tool_choice: .* arguments that are no JSON") as caught:
        takes(format_of(FAMILIES[name].template), "", "", **REQUIRED)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("name", sorted(WITH_JSON))
def test_content_in_json__is_refused_where_it_would_be_a_call(name: str) -> None:
    form, body = format_of(FAMILIES[name].template), {**ANY_OBJECT, "tools": TOOLS}
    if name == "llama":
        with pytest.raises(RequestError, match="^response_format: with tools, .* 'required'$"):
            takes(form, "", "", **body)
        takes(form, "", "", **body, tool_choice="none")
    else:
        text = '{"city": 1}'
        assert takes(form, "", (form.text.content if form.text else "") + text, **body)[0]


ANY_OBJECT = {"response_format": {"type": "json_object"}}
CHANNEL = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>"
HEADS = {
    "qwen3": "<think>\nLet me see.\n</think>\n\n",
    "gpt-oss, without a call": CHANNEL,
    "deepseek-v3.1": "Let me see.</think>",
    "kimi": "",
}


@pytest.mark.parametrize("name", HEADS)
def test_content__follows_the_schema_after_the_reasoning(name: str) -> None:
    taken = partial(takes, format_of(FAMILIES[name].template), FAMILIES[name].prefix, **ANY_OBJECT)
    assert taken(HEADS[name] + '{"a": [1]}') == (True, True)
    assert taken(HEADS[name] + "[1]")[0] is False
    assert taken(HEADS[name]) == (True, False)


def test_tokenizers_own_template__is_followed_where_its_marks_are_texts() -> None:
    form = format_of("", response_template=OWN)
    assert takes(form, "<assistant>", '(Hm.){"a": 1}', **ANY_OBJECT) == (True, True)
    with pytest.raises(RequestError, match="have a form that no grammar can follow"):
        takes(form, "<assistant>", "", **REQUIRED)
    thinking = {"open_pattern": "x+", "close": ")", "content": "text"}
    template = {**OWN, "fields": {**OWN["fields"], "thinking": thinking}}
    with pytest.raises(RequestError, match="by patterns, which no grammar can follow"):
        takes(format_of("", response_template=template), "<assistant>", "", **ANY_OBJECT)
    # A template that reads what the family writes.
    hermes = {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True}
    calls = {**hermes, "transform": {"function": "{content}"}}
    fields = {"tool_calls": calls, "content": {"content": "text"}}
    form = format_of("<tool_call>", response_template={**OWN, "fields": fields})
    assert takes(form, "<assistant>", HERMES_CALL, **REQUIRED) == (True, True)


def test_names__that_the_format_cannot_have_are_refused() -> None:
    form, tools = format_of(FAMILIES["kimi"].template), [formats.function("a:b")]
    with pytest.raises(RequestError, match="calls of 'a:b' have a form that no grammar"):
        takes(form, "", "", tools=tools, tool_choice="required")
    quoted = formats.function('say "hi"')
    text = '<tool_call>\n{"name": "say \\"hi\\"", "arguments": {}}\n</tool_call>'
    hermes = format_of("<tool_call>")
    assert takes(hermes, "", text, tools=[quoted], tool_choice="required") == (True, True)
    parser = AnswerParser(hermes.parser("", [quoted]))
    pieces = [*parser.push(text), *parser.end()]
    assert [piece.call and piece.call.name for piece in pieces] == ['say "hi"']


def test_single_calls__end_the_answer() -> None:
    form = format_of(FAMILIES["qwen3"].template)
    named = formats.function("get_weather")
    for body, expected in (
        ({"tool_choice": "required"}, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, False),
        ({"tool_choice": named}, False),
    ):
        assert takes(form, "", HERMES_CALL, tools=TOOLS, **body) == (True, True)
        assert takes(form, "", f"{HERMES_CALL}\n{HERMES_CALL}", tools=TOOLS, **body)[0] is expected
    other = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    assert takes(form, "", other, tools=TOOLS, tool_choice=named)[0] is False
