"""Hostile grammars hurt only the process in which they are tried."""

import json
import time

import llguidance
import pytest

from runtime.errors import GrammarError
from runtime.generation.grammar_check import MAX_GRAMMAR_BYTES, WALL_SECONDS, check_grammars

REFS = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3500)}
PATTERNS = [{"type": "string", "pattern": f".*x{i}.*"} for i in range(200)]
PAIRS = [[{"properties": {f"{name}{i}": {"const": 1}}} for name in "ab"] for i in range(40)]
TEXTS = {f"p{i}": {"type": "string"} for i in range(400)}
HOSTILE_SCHEMAS = {
    "deep refs": {"$defs": {**REFS, "a3500": {"type": "string"}}, "$ref": "#/$defs/a0"},
    "a divisor that takes 22 seconds": {"type": "integer", "multipleOf": 999_983},
    "patterns whose product is huge": {"allOf": PATTERNS},
    "2^40 combinations": {"allOf": [{"anyOf": pair} for pair in PAIRS]},
    "properties that anything may follow": {"properties": {f"p{i}": {} for i in range(4000)}},
    "recursion without end": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "levels": json.loads('{"items":' * 140 + "{}" + "}" * 140),
}
HARMLESS_SCHEMAS = {
    "a large enum": {"enum": [f"item {i}" for i in range(8000)]},
    "recursion": {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}},
    "a pattern with 2^30 states": {"type": "string", "pattern": "^.*[ab].{30}$"},
    "many properties": {"properties": TEXTS, "additionalProperties": False},
    "a long text": {"type": "string", "maxLength": 10**9},
}


def of_schema(schema) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))


PROBLEM = "it is too complex|it has too many levels|no finite text follows it"


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
    grammar = llguidance.LLMatcher.grammar_from_lark(HOSTILE_LARK[name])
    with pytest.raises(GrammarError) as caught:
        check_grammars((("ok", of_schema({})), ("grammar", grammar)))
    assert "\n" not in str(caught.value)
