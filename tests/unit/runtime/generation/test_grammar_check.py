"""Hostile grammars hurt only the process in which they are tried."""

import json
import time
from typing import Any

import pytest

from runtime.errors import GrammarError
from runtime.generation.grammar_check import (
    MAX_GRAMMAR_BYTES,
    UNREAD,
    WALL_SECONDS,
    check_grammars,
)

REFS = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3500)}
PATTERNS = [{"type": "string", "pattern": f".*x{i}.*"} for i in range(200)]
PAIRS = [[{"properties": {f"{name}{i}": {"const": 1}}} for name in "ab"] for i in range(40)]


def many_properties(number: int) -> dict[str, Any]:
    texts = {f"p{i}": {"type": "string"} for i in range(number)}
    return {"properties": texts, "additionalProperties": False}


HOSTILE_SCHEMAS = {
    "deep refs": {"$defs": {**REFS, "a3500": {"type": "string"}}, "$ref": "#/$defs/a0"},
    "a divisor that takes 22 seconds": {"type": "integer", "multipleOf": 999_983},
    "patterns whose product is huge": {"allOf": PATTERNS},
    "2^40 combinations": {"allOf": [{"anyOf": pair} for pair in PAIRS]},
    "properties that anything may follow": {"properties": {f"p{i}": {} for i in range(4000)}},
    "recursion without end": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "properties of which each may be the first": many_properties(400),
    "such properties further inside": {
        "properties": {"a": many_properties(400)},
        "required": ["a"],
    },
    "levels": json.loads('{"items":' * 140 + "{}" + "}" * 140),
}
HARMLESS_SCHEMAS = {
    "a large enum": {"enum": [f"item {i}" for i in range(8000)]},
    "recursion": {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}},
    "a pattern with 2^30 states": {"type": "string", "pattern": "^.*[ab].{30}$"},
    "many properties": many_properties(200),
    "a long text": {"type": "string", "maxLength": 10**9},
}


def of_schema(schema) -> str:
    return json.dumps({"json_schema": schema})


PROBLEM = (
    "too complex|too many levels|no finite text follows it|in more than 1000 ways at one place"
)


@pytest.mark.parametrize("name", HOSTILE_SCHEMAS)
def test_hostile_schema__is_refused_within_the_limits(name: str) -> None:
    start = time.monotonic()
    with pytest.raises(GrammarError, match=PROBLEM) as caught:
        check_grammars((("schema", of_schema(HOSTILE_SCHEMAS[name])),))
    assert str(caught.value.field).startswith("schema")
    assert time.monotonic() - start < WALL_SECONDS


@pytest.mark.parametrize("name", HARMLESS_SCHEMAS)
def test_large_schema__is_accepted(name: str) -> None:
    check_grammars((("schema", of_schema(HARMLESS_SCHEMAS[name])),))


RULES = "".join(f'r{i}: r{i + 1} | "a"\n' for i in range(5000))
HOSTILE_LARK = {
    "rules that overflow the stack": f'start: r0\n{RULES}r5000: "z"',
    "a step of seconds": "start: " + "a? " * 20_000 + '\na: "x"',
    "parentheses": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000,
    "no rule": "begin: /a/",
    "too long": "start: /" + "a" * MAX_GRAMMAR_BYTES + "/",
}


@pytest.mark.parametrize("name", HOSTILE_LARK)
def test_hostile_lark__is_refused_within_the_limits(name: str) -> None:
    grammar = json.dumps({"lark_grammar": HOSTILE_LARK[name]})
    with pytest.raises(GrammarError) as caught:
        check_grammars((("ok", of_schema({})), ("grammar", grammar)))
    assert "\n" not in str(caught.value)


CHAIN = "".join(f"a{i} ::= a{i + 1}\n" for i in range(6000))
HOSTILE_GBNF = {
    "empty lines, to look through in quadratic time": "\n" * 40_000 + 'root ::= "a"',
    "rules that each pass over all resolves one of": f'root ::= a0\n{CHAIN}a6000 ::= "a"',
    "levels": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000,
    "a rule that is not there": "root ::= a",
}


@pytest.mark.parametrize("name", HOSTILE_GBNF)
def test_hostile_gbnf__is_read_in_the_other_process(name: str, monkeypatch) -> None:
    monkeypatch.setattr("runtime.generation.grammar_check.any_to_lark", None)
    with pytest.raises(GrammarError, match=r"too complex|too many levels|'a' not found"):
        check_grammars((("grammar", json.dumps({UNREAD: HOSTILE_GBNF[name]})),))
