"""The form in which a chat template takes tools and an assistant's calls, found by trying it.

Templates disagree on whether a call's arguments are JSON or an object; a wrong guess fails, or is
written as Python.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from runtime.generation.chat_template import has_template
from runtime.serving.api.chat_messages import CalledFunction, ChatMessage, ToolCallMessage

OFFERED, CALLED = "moecast_offered", "moecast_called"
"""Names of tools that show what the template writes."""
WRONG = ("'moecast_key'", '\\"moecast_key')
"""Arguments as Python writes an object, and JSON in JSON."""
CALL_ID = "moecast00"
ROLES = {"developer": "system"}
"""Few templates know OpenAI's newer role."""


@dataclass(frozen=True)
class ToolTemplate:
    """The form that the template of a model wants."""

    takes_tools: bool = True
    takes_text: bool = False
    """A call's arguments are JSON instead of an object."""
    takes_calls: bool = True

    def messages(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Messages as the template takes them."""
        return [self._message(message) for message in messages]

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        written: dict[str, Any] = {"role": ROLES.get(message.role, message.role)}
        written["content"] = message.text
        if message.reasoning_content:
            written["reasoning_content"] = message.reasoning_content
        if message.role == "tool":
            written |= {"tool_call_id": message.tool_call_id, "name": message.name}
        if message.tool_calls:
            # Left out where it is null, which templates take better than an empty text.
            written["content"] = None if message.content is None else message.text
            written["tool_calls"] = [call.model_dump() for call in message.tool_calls]
            for call in written["tool_calls"]:
                call["function"]["arguments"] = self._arguments(call["function"]["arguments"])
        return written

    def _arguments(self, text: str) -> Any:
        if self.takes_text:
            return text
        try:
            arguments = json.loads(text or "{}")
        except ValueError:
            return text
        return arguments if isinstance(arguments, Mapping) else text


def find_tool_template(tokenizer: PreTrainedTokenizerBase) -> ToolTemplate:
    """Try the forms of a call, the usual one first."""
    if not has_template(tokenizer):
        return ToolTemplate(takes_tools=False, takes_calls=False)
    tools = [{"type": "function", "function": {"name": OFFERED, "parameters": {}}}]
    question = {"role": "user", "content": "?"}
    takes_tools = OFFERED in attempt(tokenizer, [question], tools)
    function = CalledFunction(name=CALLED, arguments='{"moecast_key": 1}')
    call = ToolCallMessage(id=CALL_ID, function=function)
    for takes_text in (False, True):
        style = ToolTemplate(takes_tools, takes_text)
        asked = ChatMessage(role="assistant", tool_calls=[call])
        answered = ChatMessage(role="tool", content="?", tool_call_id=CALL_ID, name=CALLED)
        text = attempt(tokenizer, [question, *style.messages([asked, answered])], tools)
        if CALLED in text and "moecast_key" in text and not any(form in text for form in WRONG):
            return style
    return ToolTemplate(takes_tools, takes_calls=takes_tools)


def attempt(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> str:
    """Returns what the template writes; nothing if it refuses."""
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False
            )
        )
    # A template's own code raises exceptions of every type.
    except Exception:
        return ""
