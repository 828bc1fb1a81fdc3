"""Answers that follow a schema or a grammar, from a model whose own language is too weak for it."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import jsonschema
import llguidance
import pytest
from pydantic import BaseModel, Field

from runtime.generation.constraint import GrammarVocabulary, compile_grammar
from runtime.generation.sampling import SamplingParams
from runtime.serving.choice import CompletionChoice, TokenDelta
from tests.builders.families.build import tiny_model
from tests.builders.families.table import FAMILIES
from tests.builders.plain_answers import TOKENIZER, ids
from tests.builders.serving import RunningServer
from tests.unit.runtime.serving.test_answer_formats import closed_object, function
from tests.unit.runtime.serving.test_completions import CHAT, COMPLETIONS, HELLO, raw
from tests.unit.runtime.serving.test_rejections import post, refused
from tests.unit.runtime.serving.test_tools import calls_of

PROPERTIES = {
    "name": {"type": "string", "maxLength": 8},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
}
SCHEMA = closed_object(PROPERTIES)
TOOLS = [function(name, parameters=SCHEMA) for name in ("get_person", "set_person")]
FORMAT = {"type": "json_schema", "json_schema": {"name": "human", "schema": SCHEMA, "strict": True}}
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 2, "seed": 1},
    {"temperature": 1, "seed": 2, "min_p": 0.5, "repetition_penalty": 2},
    {"temperature": 1, "seed": 3, "min_tokens": 300, "ignore_eos": True},
    {"temperature": 1, "seed": 4, "logit_bias": {"0": 100}, "logprobs": True},
]


def ask(server: RunningServer, **more: Any) -> list[dict[str, Any]]:
    body = {"messages": HELLO, "max_tokens": 400, "temperature": 0, **more}
    return raw(server, CHAT, **body)["choices"]


def check(choice: dict[str, Any]) -> str:
    """The content, which follows the schema."""
    assert choice["finish_reason"] == "stop"
    content = choice["message"]["content"]
    jsonschema.validate(json.loads(content), SCHEMA)
    return content


@pytest.mark.parametrize("options", OPTIONS)
def test_schema__is_followed_whatever_the_options(server, options):
    choices = ask(server, response_format=FORMAT, n=2, **options)
    contents = [check(choice) for choice in choices]
    assert (contents[0] == contents[1]) == (options["temperature"] == 0)
    if options.get("logprobs"):
        entries = [choice["logprobs"]["content"] for choice in choices]
        assert ["".join(entry["token"] for entry in one) for one in entries] == contents


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"regex": r"(foo|bar)/\d{3}"}, r"(foo|bar)/\d{3}"),
    ({"choice": ["yes", 'no, "é😀"\n']}, 'yes|no, "é😀"\n'),
    ({"choice": [f"{i}" for i in range(4000)]}, r"\d{1,4}"),
    ({"grammar": 'root ::= "x" digit "y"\ndigit ::= [0-9]'}, r"x\dy"),
    ({"grammar": 'start: "a" b\nb: /[xyz]{4}/'}, "a[xyz]{4}"),
    ({"json": json.dumps({"const": {"a": 1}})}, r'\{\s*"a"\s*:\s*1\s*\}'),
    ({"json": {"enum": [1, 2]}}, "[12]"),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS)
def test_forms__of_structured_outputs_are_followed(server, form, pattern):
    for options in ({"temperature": 0}, {"temperature": 2, "seed": 1}):
        body = {"prompt": "The heart", "max_tokens": 90, "structured_outputs": form, **options}
        choice = raw(server, COMPLETIONS, **body)["choices"][0]
        assert re.fullmatch(pattern, choice["text"])
        assert choice["finish_reason"] == "stop"


def test_any_object__is_one(server: RunningServer) -> None:
    (choice,) = ask(server, structured_outputs={"json_object": True}, max_tokens=60)
    assert choice["message"]["content"].startswith("{")


def test_end__comes_where_the_grammar_allows_it_or_a_stop_string(server: RunningServer) -> None:
    def end(regex: str, **options: Any) -> tuple[str, str]:
        (choice,) = ask(server, structured_outputs={"regex": regex}, **options)
        return choice["message"]["content"], choice["finish_reason"]

    # The end of the text has id 0.
    ending: dict[str, Any] = {"logit_bias": {"0": 100}, "temperature": 2, "seed": 5}
    assert end("(ab)*c?", **ending) == ("", "stop")
    assert re.fullmatch("(ab)+", end("(ab)*", **ending, min_tokens=3)[0])
    assert end("(ab){20}", stop="bab") == ("a", "stop")
    assert end("(ab){20}", max_tokens=2)[1] == "length"


class Person(BaseModel):
    name: str = Field(max_length=8)
    mood: Literal["glad", "sad"]
    age: int = Field(ge=0, le=9)
    friend: "Person | None"


def test_lockstep__each_answer_has_its_own_place(server: RunningServer) -> None:
    expected = ["a" * 3, "b" * 9, "c" * 20, "d" * 5]
    forms = [{"regex": text} for text in expected]

    def text(form: dict[str, Any] | None) -> str:
        return ask(server, max_tokens=30, structured_outputs=form)[0]["message"]["content"]

    expected.append(text(None))
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(text, [*forms, None])) == expected


# ---- tools


@pytest.mark.parametrize("choice", ["required", function("set_person")])
@pytest.mark.parametrize("thinks", [False, True])
def test_calls__follow_the_schema(agents, force, choice, thinks):
    if thinks:
        force("{So.\n</think>", is_whole=False)
    options = {"parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": thinks}}
    (answer,) = ask(agents, tools=TOOLS, tool_choice=choice, **options)
    ((name, arguments),) = calls_of(answer["message"])
    assert name == "set_person" or choice == "required"
    jsonschema.validate(arguments, SCHEMA)
    assert answer["finish_reason"] == "tool_calls"
    assert not answer["message"]["content"]
    if thinks:
        assert answer["message"]["reasoning_content"] == "{So."


@pytest.mark.parametrize("strict", [True, False])
def test_calls_of_strict_tools__follow_the_schema(agents, force, strict):
    tools = [function("get_person", parameters=SCHEMA, strict=strict)]
    force('I look {it} up.\n<tool_call>\n{"name": "', is_whole=False)
    (answer,) = ask(agents, tools=tools)
    if strict:
        ((name, arguments), *_) = calls_of(answer["message"])
        assert name == "get_person"
        jsonschema.validate(arguments, SCHEMA)
        assert answer["message"]["content"] == "I look {it} up."
    else:
        assert "tool_calls" not in answer["message"]
    # Without a call, any text may come.
    force("It is {sunny}.")
    assert ask(agents, tools=tools)[0]["message"]["content"] == "It is {sunny}."


# ---- what cannot be compiled

SCHEMAS: dict[str, dict[str, Any]] = {
    ".properties.a.items": {"properties": {"a": {"items": {"not": {}}}}},
    ".anyOf[1]": {"anyOf": [{"type": "string"}, {"type": "banana"}]},
    ".items.pattern": {"items": {"type": "string", "pattern": "(?=x)"}},
    "": {"$ref": "#/$defs/nowhere"},
    # The innermost one, not the definition that it comes from.
    ".items": {"$defs": {"a": {"items": {"uniqueItems": True}}}, "items": {"$ref": "#/$defs/a"}},
}


@pytest.mark.parametrize("path", SCHEMAS)
def test_schema_at_fault__is_named(server: RunningServer, path: str) -> None:
    given = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMAS[path]}}
    error = refused(server, CHAT, messages=HELLO, response_format=given)
    assert error["param"] == f"response_format.json_schema.schema{path.removesuffix('.pattern')}"
    assert "\n" not in error["message"]


RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def test_other_doors__have_schemas_too(server: RunningServer) -> None:
    options: Any = {"text_format": Person, "max_output_tokens": 2000}
    parsed = server.openai().responses.parse(model="tiny", input="?", **options)
    assert isinstance(parsed.output_parsed, Person)
    asked = {"messages": HELLO, "max_tokens": 400, "temperature": 0}
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = raw(server, MESSAGES, **asked, output_config=config)
    jsonschema.validate(json.loads(answer["content"][0]["text"]), SCHEMA)


WRONG = {"properties": {"a": {"not": {}}}}


def test_schemas_of_other_doors__are_named_by_their_paths(agents: RunningServer) -> None:
    schema = {"type": "json_schema", "name": "a", "schema": WRONG}
    tool = {"name": "f", "strict": True, "input_schema": WRONG}
    asked = {"messages": HELLO, "max_tokens": 9}
    for path, body, place in (
        (RESPONSES, {"input": "?", "text": {"format": schema}}, "text.format.schema"),
        (MESSAGES, {**asked, "output_config": {"format": schema}}, "output_config.format.schema"),
        (MESSAGES, {**asked, "tools": [tool]}, "tools[0].input_schema"),
    ):
        answer = post(agents, path, json.dumps(body))
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith(f'{place}.properties.a: "not": this server cannot constrain')


def test_models_with_an_encoder__count_from_the_decoders_start() -> None:
    family = FAMILIES["switch_transformers"]
    model = tiny_model(replace(family, changes={**family.changes, "vocab_size": 8192}))
    vocabulary = GrammarVocabulary(TOKENIZER, 8192, special_ids=[0, 1], end_ids=[1])
    lark = '%llguidance {"no_forcing": true}\nstart: /(yes|no){9}/'
    grammar = compile_grammar(llguidance.LLMatcher.grammar_from_lark(lark), vocabulary)

    def answer(**more: Any) -> list[TokenDelta]:
        events: list[Any] = []
        ends = frozenset({1})
        sampling = SamplingParams(max_new_tokens=40, temperature=0.0, stop_token_ids=ends, **more)
        choice = CompletionChoice(ids("The heart pumps"), sampling, deliver=events.extend)
        choice.run(model, TOKENIZER)
        choice.complete()
        return [event for event in events if isinstance(event, TokenDelta)]

    assert re.fullmatch("(yes|no){9}", "".join(event.text for event in answer(grammar=grammar)))
    # The end of the text counts as a token.
    assert len(answer(min_tokens=3, logit_bias={1: 100.0})) == 4
