"""Forms of reasoning and tool calls by family of models, as Transformers' response templates.

A tokenizer's own `response_template` counts first. Few have one yet; the others are known by what
their chat template writes for an assistant's message, which is what the model has learnt to write:
`answer_formats.yaml`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser

from predictors.records import StrictRecord
from predictors.typed_values import read_table

REASONING, TOOL_CALLS, CONTENT = "reasoning_content", "tool_calls", "content"
REASONING_FIELDS = (REASONING, "thinking", "reasoning")
"""Names of the reasoning in templates of the Hub."""
UNMARKED = "unmarked"
"""Text outside of all marks, in a format that marks its content too."""
TAIL_TOKENS = 16
"""Tokens at the end of a prompt that show whether it has begun the reasoning."""

Field = Mapping[str, Any]


class CallText(StrictRecord):
    """The text of calls whose arguments are JSON, as chat templates write it."""

    begin: str
    call: str
    """With `{name}` and `{arguments}`, and `{number}` for any."""
    between: str = ""
    end: str = ""
    is_single: bool = False
    """An answer has one call at most."""


class AnswerText(StrictRecord):
    """The marks that a model writes, for grammars."""

    reasoning: tuple[str, str] | None = None
    """Marks that begin and end it, if the model may reason."""
    content: str = ""
    """Mark that begins the content."""
    remark: tuple[str, str] | None = None
    """Marks that begin and end content before a call."""
    call: CallText | None = None
    """None: it has no calls, or arguments that are no JSON."""


class KnownFormat(StrictRecord):
    """The form in which models of some families write answers."""

    families: str
    """The models' names, for people."""
    marks: Sequence[str]
    """Texts that their chat template has, all of them."""
    fields: Mapping[str, Field]
    """Fields of a response template of Transformers."""
    text: AnswerText = AnswerText()


class KnownFormats(StrictRecord):
    """The tables of `answer_formats.yaml`."""

    reasoning: Sequence[tuple[str, str]]
    """Marks that begin and end the reasoning, where a format has none; the first that a chat
    template has."""
    calls_end: str
    """Pattern of the text that ends a list of calls, each of which has ended."""
    kinds: Mapping[str, Field]
    """Parts of fields that several formats share."""
    formats: Sequence[KnownFormat]
    """The first whose marks a chat template has counts."""


@cache
def read_known_formats() -> KnownFormats:
    """Return the formats of models without a response template."""
    return KnownFormats(**read_table(Path(__file__).with_name("answer_formats.yaml")))


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """The form in which a model writes reasoning and tool calls."""

    template: Mapping[str, Any]
    """A response template of Transformers."""
    token_ids: frozenset[int]
    """Special tokens that it marks them with."""
    is_own: bool
    """The tokenizer's own, whose template finds the assistant's part of the prompt itself."""
    text: AnswerText | None
    """None: its marks are patterns, which only the parser knows."""

    @property
    def has_calls(self) -> bool:
        return TOOL_CALLS in self.template["fields"]

    @property
    def marks_calls(self) -> bool:
        """Whether calls begin with a mark; else they begin as any text in JSON."""
        return self.text is None or self.text.call is None or self.text.call.begin != ""

    @property
    def has_reasoning(self) -> bool:
        return not self.template["fields"].keys().isdisjoint(REASONING_FIELDS)

    def parser(self, prefix: str, tools: list[dict[str, Any]]) -> ResponseParser:
        """Begin an answer.

        Args:
            prefix: text that the prompt has written of the answer.
            tools: without any, calls are text as any other.
        """
        fields = dict(self.template["fields"])
        if not tools:
            fields.pop(TOOL_CALLS, None)
            end = read_known_formats().calls_end
            for name, field in fields.items():
                fields[name] = {key: value for key, value in field.items() if value != end}
        return ResponseParser({**self.template, "fields": fields}, prefix=prefix, tools=tools)

    def prefix(self, prompt: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
        """The text that a prompt has written of its answer, such as `<think>`."""
        text = str(tokenizer.decode(prompt if self.is_own else prompt[-TAIL_TOKENS:]))
        if self.is_own:
            return text
        return self.begun_reasoning(text) or ""

    def begun_reasoning(self, prompt: str) -> str | None:
        """Return the mark that begins the reasoning, if the prompt ends with it."""
        marks = self.text and self.text.reasoning
        return marks[0] if marks and prompt.rstrip().endswith(marks[0]) else None


def find_answer_format(
    tokenizer: PreTrainedTokenizerBase, special_tokens: Mapping[str, int]
) -> AnswerFormat | None:
    """The format of a model's answers; None if they have neither reasoning nor calls."""
    fields, text = known_fields(str(getattr(tokenizer, "chat_template", None) or ""))
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        ids = frozenset(special_tokens.values())
        marks = own_text(own["fields"], text.call)
        return AnswerFormat(template=own, token_ids=ids, is_own=True, text=marks)
    if len(fields) < 2:
        return None
    patterns = "".join(str(field) for field in fields.values()).replace("\\", "")
    ids = frozenset(id for name, id in special_tokens.items() if name in patterns)
    return AnswerFormat(
        template={"start_anchor_pattern": r"\A", "fields": fields},
        token_ids=ids,
        is_own=False,
        text=text,
    )


def own_text(fields: Mapping[str, Field], call: CallText | None) -> AnswerText | None:
    """The marks of a tokenizer's own template; it may read calls as the family writes them."""
    content = fields.get(CONTENT, {})
    thoughts = next((fields[name] for name in REASONING_FIELDS if name in fields), None)
    marks = None if thoughts is None else (thoughts.get("open", ()), thoughts.get("close", ()))
    begin: Any = () if "open_pattern" in content else content.get("open", "")
    if not all(isinstance(text, str) for text in (begin, *(marks or ()))):
        return None
    return AnswerText(reasoning=marks, content=begin, call=call)


def known_fields(chat_template: str) -> tuple[dict[str, Field], AnswerText]:
    """The fields of an answer, and the text of their marks, by what a chat template has."""
    known = read_known_formats()
    marks = next((marks for marks in known.reasoning if marks[0] in chat_template), None)
    fields: dict[str, Field] = {}
    if marks is not None:
        # In the middle of an answer, the mark is what the text is about.
        before = rf"(?:\A|{re.escape(marks[1])}|{known.calls_end})\s*"
        opening = re.escape(marks[0])
        fields[REASONING] = {
            "open_pattern": rf"{opening}(?<={before}{opening})",
            "close": marks[1],
            "content": "text",
        }
    text = AnswerText()
    for known_format in known.formats:
        if all(mark in chat_template for mark in known_format.marks):
            fields |= known_format.fields
            text = known_format.text
            break
    fields.setdefault(CONTENT, {"close_pattern": known.calls_end, "content": "text"})
    return fields, text.model_copy(update={"reasoning": text.reasoning or marks})
