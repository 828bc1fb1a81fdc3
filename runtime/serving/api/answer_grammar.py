"""Writes the grammar of an answer: a request's schemas, in the form in which the family writes.

Grammars are Lark's as llguidance reads them. Reasoning comes first and is free; then comes content,
or calls. Marks may be special tokens, which a grammar names by their ids.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llguidance

from runtime.errors import GrammarError
from runtime.generation.constraint import CompiledGrammar, compile_grammar
from runtime.generation.grammar_check import UNREAD, check_grammars
from runtime.serving.answers.answer_formats import AnswerFormat, AnswerText
from runtime.serving.answers.answer_parser import AnswerParser
from runtime.serving.api.schemas import ChatRequest, GenerationBody, StructuredOutputs
from runtime.serving.errors import RequestError
from runtime.serving.served_model import ModelInfo

Part = Mapping[str, Any]
"""A grammar within a grammar: `json_schema`, `lark_grammar`, or one to be read first (`UNREAD`)."""

SPACES = {"whitespace_pattern": r" |\n[ \t]{0,32}"}
"""In JSON. A weak model would write any number."""
HEAD = r"""%llguidance {"no_forcing": true}
TEXT: /(?s:.*)/
NO_CALL: /\s{0,4}([^{\s](?s:.*))?/
SPACES: /\s{0,4}/
"""
"""The model chooses the tokens also where only one text is possible."""
MARK = re.compile(r"<[^<>]+>|\[\w+\]")
"""Mark that only a call begins with."""


def completion_grammar(body: GenerationBody, info: ModelInfo) -> CompiledGrammar | None:
    """The grammar of a completion; None: it may be any text.

    Raises:
        RequestError: it cannot be compiled.
    """
    parts = content_parts(body)
    return compile_parts("start: @part0", parts, info) if parts else None


def chat_grammar(body: ChatRequest, info: ModelInfo, prefix: str) -> CompiledGrammar | None:
    """The grammar of a chat's answer; None: it may be any text.

    Args:
        prefix: what the prompt has written of the answer.

    Raises:
        RequestError: it cannot be compiled, or the model's answers have a form that no grammar has.
    """
    parts, tools, form = content_parts(body), body.called_tools, info.answer_format
    if not (parts or body.must_call or any(tool.strict for tool in tools.values())):
        return None
    cause = next(iter(parts), "tool_choice" if body.must_call else "tools")
    text = AnswerText() if form is None else form.text
    if text is None:
        raise RequestError(
            f"{cause}: this model's tokenizer describes its answers by patterns, which no grammar "
            "can follow; leave it out",
            param=cause,
        )
    content = None if body.must_call else ("@part0" if parts else "TEXT")
    calls = []
    for place, tool in tools.items():
        path = f"tools[{place}].function"
        if form is None or not can_call(form, prefix, tool.name, body.offered_tools):
            raise RequestError(
                f"{cause}: this model's calls of {tool.name!r} have a form that no grammar can "
                "follow, such as arguments that are no JSON; leave it out",
                param=cause,
            )
        if content == "@part0" and not form.marks_calls and "json_schema" in parts[cause]:
            raise RequestError(
                f"{cause}: with tools, what this model begins as JSON is a call; set tool_choice "
                "to 'none' or 'required'",
                param=cause,
            )
        calls.append((tool.name, f"@part{len(parts)}"))
        schema = (tool.parameters if tool.strict or body.must_call else None) or {}
        parts[f"{path}.parameters"] = json_part({"type": "object", **schema})
    is_single = body.parallel_tool_calls is False or not isinstance(body.tool_choice, str | None)
    writer = LarkWriter(text, info.special_tokens)
    lark = writer.answer(
        content=content,
        calls=calls,
        has_begun=form is not None and form.begun_reasoning(prefix) is not None,
        is_single=is_single,
    )
    return compile_parts(lark, parts, info)


def compile_parts(lark: str, parts: Mapping[str, Part], info: ModelInfo) -> CompiledGrammar:
    """Compile a grammar of which the request's fields give parts.

    Raises:
        RequestError: one of them cannot be compiled.
    """
    try:
        read = check_grammars(tuple((path, json.dumps(part)) for path, part in parts.items()))
        named = [{"name": f"part{number}", **part} for number, part in enumerate(read)]
        whole = json.dumps({"grammars": [{"name": "answer", "lark_grammar": HEAD + lark}, *named]})
        return compile_grammar(whole, info.grammar_vocabulary)
    except GrammarError as error:
        path = error.field or next(iter(parts))
        raise RequestError(f"{path}: {error}", param=path) from error


# ---- what the request gives


def json_part(schema: Mapping[str, Any]) -> Part:
    return {"json_schema": {**schema, "x-guidance": SPACES}}


def content_parts(body: GenerationBody) -> dict[str, Part]:
    """The grammar of the content by the field that gives it; nothing if it may be any text.

    Raises:
        RequestError: two fields give one, or it cannot be read.
    """
    parts: dict[str, Part] = {}
    if body.response_format is not None and body.response_format.type != "text":
        schema = body.response_format.json_schema
        if schema is None:
            parts["response_format"] = json_part({"type": "object"})
        else:
            parts["response_format.json_schema.schema"] = json_part(schema.schema_)
    if body.structured_outputs is not None:
        if parts:
            raise RequestError(
                "structured_outputs: response_format is given too; leave one of them out",
                param="structured_outputs",
            )
        (name,) = body.structured_outputs.model_fields_set
        path = f"structured_outputs.{name.rstrip('_')}"
        try:
            parts[path] = structured_part(body.structured_outputs)
        # llguidance's of a regular expression is a ValueError, too.
        except (GrammarError, ValueError) as error:
            raise RequestError(f"{path}: {error!s:.400}", param=path) from error
    return parts


def structured_part(given: StructuredOutputs) -> Part:
    if given.regex is not None:
        return {"lark_grammar": f"start: /{llguidance.regex_to_lark(given.regex, '')}/"}
    if given.choice is not None:
        # A terminal: of a rule, each alternative counts as a way to go on.
        return {
            "lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, given.choice))
        }
    if given.grammar is not None:
        return {UNREAD: given.grammar}
    schema = {"type": "object"} if given.json_ is None else given.json_
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise GrammarError(f"it is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise GrammarError("must be an object")
    return json_part(schema)


# ---- what the model writes


def can_call(form: AnswerFormat, prefix: str, name: str, tools: list[dict[str, Any]]) -> bool:
    """Whether the parser finds a call in the text that the grammar would have of it."""
    if form.text is None or form.text.call is None:
        return False
    begun = form.begun_reasoning(prefix) is not None
    written = form.text.call
    call = name_call(written.call, name).replace("{arguments}", "{}").replace("{number}", "0")
    before = form.text.reasoning[1] if begun and form.text.reasoning else ""
    parser = AnswerParser(form.parser(prefix, tools))
    pieces = [*parser.push(before + written.begin + call + written.end), *parser.end()]
    return [piece.call and piece.call.name for piece in pieces] == [name]


def name_call(call: str, name: str) -> str:
    """A call's text with the name, which may be in JSON."""
    return call.replace('"{name}"', json.dumps(name)).replace("{name}", name)


@dataclass(frozen=True)
class LarkWriter:
    """Writes a model's marks around the parts of an answer."""

    text: AnswerText
    special_tokens: Mapping[str, int]

    def answer(
        self,
        *,
        content: str | None,
        calls: Sequence[tuple[str, str]],
        has_begun: bool,
        is_single: bool,
    ) -> str:
        """All rules of an answer.

        Args:
            content: the rule of the content; None: calls only.
            calls: name and rule of the arguments of each tool.
            has_begun: the prompt has begun the reasoning.
            is_single: one call at most.
        """
        rules, reasoning = [], ""
        if self.text.reasoning is not None:
            opening, closing = self.text.reasoning
            rules += self._until("thinking", closing)
            thought = f"{self._literal(opening)} thinking SPACES"
            if content == "TEXT" and self.text.remark is not None:
                rules += self._until("remark", self.text.remark[1])
                thought += f" | {self._literal(self.text.remark[0])} remark"
            rules.append(f"thought: {thought}")
            # A weak model would think for ever, where only one mark begins with `<`.
            again = "thought*" if self.text.content else ""
            reasoning = f"thinking SPACES {again}" if has_begun else again or "thought?"
        bodies = []
        written = self.text.call
        if calls and written is not None:
            before, after = written.call.split("{arguments}")
            alternatives = [
                f"{self._call(before, name)} {rule} {self._literal(after)}" for name, rule in calls
            ]
            rules.append(f"call: {' | '.join(alternatives)}")
            more = f"({self._literal(written.between)} call)*"
            if is_single or written.is_single:
                more = ""
            rules.append(f"calls: call {more} {self._literal(written.end)}")
            mark = MARK.match(written.begin)
            if content == "TEXT" and mark is not None and not self.text.content:
                rules += self._until("said", mark[0])
                bodies.append(f"said {self._literal(written.begin[mark.end() :])} calls")
            else:
                bodies.append(f"{self._literal(written.begin)} calls")
                content = "NO_CALL" if content == "TEXT" and mark is None else content
        if content is not None:
            bodies.append(f"{self._literal(self.text.content)} {content}")
        rules.append(f"body: {' | '.join(bodies)}")
        rules.append(f"start: {reasoning} body")
        return "\n".join(rules)

    def _until(self, rule: str, mark: str) -> list[str]:
        """A rule for any text up to a mark, and the mark."""
        first, *rest = self._pieces(mark)
        if first.startswith("<["):
            return [f"{rule}: TEXT {first} {' '.join(rest)}"]
        return [f"{rule}_end[lazy]: TEXT {first}", f"{rule}: {rule}_end {' '.join(rest)}"]

    def _call(self, before: str, name: str) -> str:
        parts = map(self._literal, name_call(before, name).split("{number}"))
        return " /[0-9]{1,3}/ ".join(parts)

    def _literal(self, text: str) -> str:
        return " ".join(self._pieces(text))

    def _pieces(self, text: str) -> list[str]:
        """A text as strings and special tokens."""
        names = "|".join(re.escape(name) for name in self.special_tokens if name) or "(?!)"
        return [
            f"<[{self.special_tokens[piece]}]>"
            if piece in self.special_tokens
            else json.dumps(piece)
            for piece in re.split(f"({names})", text)
            if piece
        ]
