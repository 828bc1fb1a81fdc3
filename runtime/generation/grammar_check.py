"""Compiles a client's grammars in a process of its own first, which may be killed.

Grammars are hostile input: a chain of 20,000 `$ref` overflows the stack of llguidance's compiler, a
`multipleOf` of 999983 takes it 22 seconds. What compiles there within `CPU_SECONDS` and
`MEMORY_BYTES` does so here.
"""

import json
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from runtime.errors import GrammarError

MAX_GRAMMAR_BYTES = 128 << 10
"""OpenAI's limit for the texts of a schema is 120,000 characters."""
CPU_SECONDS = 2
"""Time limit of the process, whose start takes a twentieth."""
MEMORY_BYTES = 64 << 20
STACK_BYTES = 1 << 20
"""Threads of the server have eight times as much."""
WALL_SECONDS = 30.0
"""On a machine whose cores are busy."""
NUM_REMEMBERED = 64
"""Requests of one client have the same schema."""
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=1000, step_max_items=10_000, max_lexer_states=20_000, verbose_errors=False
)
"""Bound one step to some tens of milliseconds, and the states of an answer to some 40 MiB."""

NUM_TRIED = 64
"""Bytes of an answer to try: after a brace, an object may go on with any of its properties."""
NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value has subschemas by name."""
LISTED = ("anyOf", "allOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalProperties")
UNKNOWN_FORMAT = re.compile(r"Unknown format: (\S+)")
UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")

BYTES = llguidance.LLTokenizer("byte")
"""The compiler reads no other tokens."""

Part = tuple[str, str]
"""A field of the request, and the grammar that it gives: JSON of an object as llguidance reads it,
or with `UNREAD`."""
UNREAD = "unread"
"""Key of a grammar in Lark's form or in GBNF. Telling them apart and converting takes quadratic
time."""

_turn = threading.Lock()


@lru_cache(maxsize=NUM_REMEMBERED)
def check_grammars(parts: tuple[Part, ...]) -> list[dict[str, Any]]:
    """Compile each grammar where that cannot hurt, one request at a time.

    Returns:
        The grammars as llguidance reads them.

    Raises:
        GrammarError: for the first that cannot be compiled, with its field.
    """
    num_bytes = sum(len(grammar.encode()) for _, grammar in parts)
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise GrammarError(
            f"it has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed", field=parts[0][0]
        )
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); import {__name__} as it; it.answer_parent()"
    with _turn:
        try:
            child = subprocess.run(
                [sys.executable, "-P", "-c", code],
                input=json.dumps(parts).encode(),
                capture_output=True,
                timeout=WALL_SECONDS,
                check=False,
            )
            found = json.loads(child.stdout) if child.returncode == 0 else None
        except subprocess.TimeoutExpired:
            found = None
    if found is None:
        raise GrammarError(
            f"it is too complex: compiling it takes more than {CPU_SECONDS} seconds or "
            f"{MEMORY_BYTES >> 20} MiB",
            field=parts[-1][0],
        )
    if isinstance(found, dict):
        raise GrammarError(found["problem"], field=found["field"])
    return found


def answer_parent() -> None:
    """In the child: compile what is on standard input, and write the grammars or what is wrong."""
    parts = json.load(sys.stdin)
    num_pages = int(Path("/proc/self/statm").read_text().split()[5])
    most = num_pages * resource.getpagesize() + STACK_BYTES + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(read_grammars(parts)))
    thread.start()
    thread.join()
    sys.stdout.write(json.dumps(found[0]))


def read_grammars(parts: Sequence[Part]) -> list[dict[str, Any]] | dict[str, str]:
    """The grammars as llguidance reads them; or the first problem, if not all compile and begin."""
    grammars = []
    for field, text in parts:
        grammar = json.loads(text)
        try:
            if UNREAD in grammar:
                grammar = {"lark_grammar": any_to_lark(grammar[UNREAD])}
        # The reader of GBNF raises exceptions of every type.
        except Exception as error:
            problem = "it has too many levels" if isinstance(error, RecursionError) else str(error)
            return {"field": field, "problem": f"{problem:.400}"}
        problem = problem_of(json.dumps({"grammars": [grammar]}))
        if problem:
            schema = grammar.get("json_schema")
            path = path_of_problem(schema, problem) if isinstance(schema, dict) else ""
            return {"field": field + path, "problem": describe(problem)}
        grammars.append(grammar)
    return grammars


def problem_of(grammar: str) -> str:
    """The message of llguidance; empty if the grammar compiles, begins, and goes on."""
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0, limits=LIMITS)
    for _ in range(NUM_TRIED):
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = matcher.compute_bitmask()
        first = next((n for n in (*b"{", *range(33, 256)) if allowed[n // 8] >> n % 8 & 1), None)
        if first is None:
            break
        matcher.consume_token(first)
    return matcher.get_error()


def path_of_problem(
    schema: dict[str, Any], problem: str, definitions: Mapping[str, Any] | None = None
) -> str:
    """The path of the innermost subschema that has this problem by itself."""
    if definitions is None:
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    for path, subschema in subschemas(schema):
        whole = {**definitions, **subschema}
        if problem_of(llguidance.LLMatcher.grammar_from_json_schema(whole)) == problem:
            return path + path_of_problem(subschema, problem, definitions)
    return ""


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas in a schema with their paths, those of definitions last."""
    found: list[tuple[str, Any]] = []
    for keyword in (*SINGLE, *LISTED, *NAMED):
        value = schema.get(keyword)
        if isinstance(value, list):
            found += [(f".{keyword}[{i}]", one) for i, one in enumerate(value)]
        elif isinstance(value, dict) and keyword in NAMED:
            found += [(f".{keyword}.{name}", one) for name, one in value.items()]
        else:
            found.append((f".{keyword}", value))
    yield from (pair for pair in found if isinstance(pair[1], dict))


def describe(problem: str) -> str:
    """The message in words about the request."""
    if keywords := UNIMPLEMENTED.search(problem):
        return f"{keywords[1]}: this server cannot constrain an answer by it; leave it out"
    if problem.startswith("oneOf"):
        return "alternatives of oneOf may overlap; use anyOf, or a const that each has of its own"
    if problem.startswith("NoExtension"):
        return "no finite text follows it"
    if unknown := UNKNOWN_FORMAT.search(problem):
        return f"format {unknown[1]!r} is unknown to this server; leave it out"
    if "recursion limit" in problem:
        return "it has too many levels"
    if "items; max is" in problem:
        return (
            f"an answer may go on in more than {LIMITS.max_items_in_row} ways at one place; allow "
            "fewer, such as by properties that are required"
        )
    if "panic" in problem or "too big" in problem or "too large" in problem:
        return "it is too complex"
    return problem.rpartition("error: ")[2].strip().split("\n")[0]
