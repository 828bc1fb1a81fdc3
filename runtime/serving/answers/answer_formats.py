"""Forms of reasoning and tool calls by family of models, as Transformers' response templates.

A tokenizer's own `response_template` counts first. Few have one yet; the others are known by what
their chat template writes for an assistant's message, which is what the model has learnt to write.

Marks have no spaces before them, which `AnswerParser` drops: a pattern that begins with them takes
quadratic time for many.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser

REASONING, TOOL_CALLS, CONTENT = "reasoning_content", "tool_calls", "content"
REASONING_FIELDS = (REASONING, "thinking", "reasoning")
"""Names of the reasoning in templates of the Hub."""
UNMARKED = "unmarked"
"""Text outside of all marks, in a format that marks its content too."""
TAIL_TOKENS = 16
"""Tokens at the end of a prompt that show whether it has begun the reasoning."""

Field = Mapping[str, Any]


@dataclass(frozen=True)
class CallText:
    """The text of calls whose arguments are JSON, as chat templates write it."""

    begin: str
    call: str
    """With `{name}` and `{arguments}`, and `{number}` for any."""
    between: str = ""
    end: str = ""
    is_single: bool = False
    """An answer has one call at most."""


@dataclass(frozen=True, kw_only=True)
class AnswerText:
    """The marks that a model writes, for grammars."""

    reasoning: tuple[str, str] | None = None
    """Marks that begin and end it, if the model may reason."""
    content: str = ""
    """Mark that begins the content."""
    remark: tuple[str, str] | None = None
    """Marks that begin and end content before a call."""
    call: CallText | None = None
    """None: it has no calls, or arguments that are no JSON."""


CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
"""A call whose name is captured by its opening mark."""
JSON = {"content": "json", "content_args": {"allow_non_json": True}, "repeats": True}


def between(open_mark: str, close_mark: str) -> Field:
    return {"open": open_mark, "close": close_mark, "content": "text"}


def named_json(open_pattern: str, close_pattern: str | None) -> Field:
    """Calls with the name in the opening mark and the arguments as JSON."""
    close = {} if close_pattern is None else {"close_pattern": close_pattern}
    return {"open_pattern": open_pattern, **close, **JSON, "transform": CALL}


def named_tags(open_pattern: str, close_pattern: str, tag_pattern: str) -> Field:
    """Calls with the name in the opening mark and a tag for each argument."""
    return {
        "open_pattern": open_pattern,
        "close_pattern": close_pattern,
        "content": "xml-inline",
        "content_args": {"tag_pattern": tag_pattern},
        "repeats": True,
        "transform": CALL,
    }


HARMONY_MESSAGE = r"(?:\s*<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>"
HARMONY_START = r"(?:<\|start\|>assistant)?"
HARMONY_CALL = (
    rf"{HARMONY_START}(?:<\|channel\|>\w+ to=functions\.(?P<name>[\w.-]+)"
    rf"| ?to=functions\.(?P<name>[\w.-]+)<\|channel\|>\w+){HARMONY_MESSAGE}"
)
HARMONY: dict[str, Field] = {
    REASONING: {
        "open_pattern": rf"{HARMONY_START}<\|channel\|>analysis<\|message\|>",
        "close": "<|end|>",
        "content": "text",
        "repeats": True,
        "join": "\n",
    },
    TOOL_CALLS: named_json(HARMONY_CALL, r"<\|(?:call|end)\|>"),
    CONTENT: {
        "open_pattern": rf"{HARMONY_START}<\|channel\|>(?:final|commentary){HARMONY_MESSAGE}",
        "close": ["<|end|>", "<|return|>"],
        "content": "text",
        "repeats": True,
        "join": "\n",
    },
    UNMARKED: {"content": "text"},
}
HARMONY_TEXT = AnswerText(
    reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    content="<|channel|>final<|message|>",
    remark=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
    call=CallText(
        "<|channel|>commentary to=functions.",
        "{name} <|constrain|>json<|message|>{arguments}",
        is_single=True,
    ),
)

CALL_FORMATS: tuple[tuple[tuple[str, ...], Field, CallText | None], ...] = (
    # Qwen3-Coder, Qwen3.5
    (
        ("<function=", "<parameter="),
        named_tags(
            r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
            "</function>",
            r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
        ),
        None,
    ),
    # GLM-4.5 and later
    (
        ("<arg_key>",),
        named_tags(
            r"<tool_call>\s*(?P<name>[^<\n\s]+)\s*",
            "</tool_call>",
            r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        ),
        None,
    ),
    # MiniMax-M2
    (
        ("<minimax:tool_call>",),
        named_tags(
            r"(?:<minimax:tool_call>\s*)?<invoke name=\"(?P<name>[^\"]+)\">",
            "</invoke>",
            r"<parameter name=\"(?P<key>[^\"]+)\">(?P<value>.*?)</parameter>",
        ),
        None,
    ),
    # DeepSeek-V3, DeepSeek-R1
    (
        ("<｜tool▁call▁begin｜>", "```json"),
        named_json(
            r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
            r"(?P<name>[^\n]+)\n```json\n",
            r"\n```\s*<｜tool▁call▁end｜>",
        ),
        CallText(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
            "<｜tool▁call▁end｜>",
            between="\n",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    # DeepSeek-V3.1
    (
        ("<｜tool▁call▁begin｜>",),
        named_json(
            r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?P<name>[^<]+)<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
        ),
        CallText(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    # Kimi-K2
    (
        ("<|tool_call_argument_begin|>",),
        named_json(
            r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
            r"(?:functions\.)?(?P<name>[^:<\s]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
            r"<\|tool_call_end\|>",
        ),
        CallText(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}"
            "<|tool_call_end|>",
            end="<|tool_calls_section_end|>",
        ),
    ),
    # Mistral, from the tokenizer's version 11 on
    (
        ("[TOOL_CALLS]", "[ARGS]"),
        named_json(
            r"\[TOOL_CALLS\](?P<name>[^\[\s]+)(?:\[CALL_ID\]\w+)?\[ARGS\]", r"(?=\[TOOL_CALLS\])"
        ),
        CallText("[TOOL_CALLS]", "{name}[ARGS]{arguments}", between="[TOOL_CALLS]"),
    ),
    # Mistral before: a list of all calls
    (
        ("[TOOL_CALLS]",),
        {**JSON, "open_pattern": r"\[TOOL_CALLS\]", "transform": {"function": "{content}"}},
        CallText(
            "[TOOL_CALLS] [", '{"name": "{name}", "arguments": {arguments}}', between=", ", end="]"
        ),
    ),
    # Hermes, Qwen and many others
    (
        ("<tool_call>",),
        {
            **JSON,
            "open": "<tool_call>",
            "close": "</tool_call>",
            "transform": {"function": "{content}"},
        },
        CallText(
            "<tool_call>",
            '\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>',
            between="\n<tool_call>",
        ),
    ),
    # Llama 3 and 4: the whole answer
    (
        ('"parameters"',),
        {
            **JSON,
            "open_pattern": r"\A\s*+(?:<\|python_tag\|>\s*+)?(?=\{\s*+\"(?:name|type)\")",
            "transform": {"function": "{content}"},
        },
        CallText("", '{"name": "{name}", "parameters": {arguments}}', is_single=True),
    ),
)
"""Calls by what the chat template has, and their text; the first that fits counts."""
CALLS_END = (
    r"(?:</tool_call>|</minimax:tool_call>|<｜tool▁calls▁end｜>|<\|tool_calls_section_end\|>)"
)
"""Text that ends a list of calls, each of which has ended."""
REASONING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


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
            for name, field in fields.items():
                fields[name] = {key: value for key, value in field.items() if value != CALLS_END}
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
    if "<|channel|>" in chat_template:
        return HARMONY, HARMONY_TEXT
    fields: dict[str, Field] = {}
    marks = next((marks for marks in REASONING_MARKS if marks[0] in chat_template), None)
    if marks is not None:
        fields[REASONING] = between(*marks)
    call = None
    for needed, field, text in CALL_FORMATS:
        if all(mark in chat_template for mark in needed):
            fields[TOOL_CALLS], call = field, text
            break
    fields[CONTENT] = {"close_pattern": CALLS_END, "content": "text"}
    return fields, AnswerText(reasoning=marks, call=call)
