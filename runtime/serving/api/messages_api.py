"""Anthropic's Messages API."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from predictors.records import Whole
from runtime.generation.answer import FinishReason
from runtime.serving.answers.answer_parser import ToolCall
from runtime.serving.api.body_fields import (
    FIRST_ERROR,
    MAX_ITEMS,
    UNSUPPORTED,
    JsonObject,
    RequestBody,
    at_most,
)
from runtime.serving.api.chat_messages import HINTS, Turns
from runtime.serving.api.itemized_response import ItemizedResponse, ItemKind
from runtime.serving.api.translation import (
    ConversationItem,
    TranslatedBody,
    answer_format,
    function_tools,
    join_items,
    text_as,
)
from runtime.serving.errors import RequestError

BILLING = "x-anthropic-billing-header:"
"""Begins a block of system prompts that differs from request to request, and says nothing."""


class ThreadUnsupported(RequestError):
    """Anthropic's client asks for a thread, and goes on without one after this error."""

    def anthropic_body(self) -> dict[str, Any]:
        body = super().anthropic_body()
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return {**body, "error": body["error"] | {"details": details}}


class ContentBlock(ConversationItem):
    needed = {
        "text": ("text",),
        "thinking": ("thinking",),
        "redacted_thinking": (),
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
    }


Blocks = Annotated[
    list[ContentBlock], FIRST_ERROR, at_most(MAX_ITEMS), text_as("text", type="text")
]


class AnthropicMessage(RequestBody):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Blocks, Field(min_length=1)]


class PromptBody(TranslatedBody):
    """A body of /v1/messages/count_tokens."""

    messages: Turns[AnthropicMessage]
    system: Blocks = []
    tool_choice: JsonObject = {}
    thinking: JsonObject = {}
    output_config: JsonObject = {}

    conversation = "messages"
    paths = {
        "stop": "stop_sequences",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "function": "<function>",
        "json_schema": "<json_schema>",
        "parameters": "input_schema",
    }
    refused = {"n": UNSUPPORTED}
    ignored_fields: ClassVar[frozenset[str]] = HINTS | {
        "context_management", "diagnostics", "inference_geo", "n", "speed", "user_profile_id",
        "workspace_id",
    }  # fmt: skip

    def chat_fields(self) -> dict[str, Any]:
        if (self.model_extra or {}).get("thread"):
            raise ThreadUnsupported(f"thread: {UNSUPPORTED}", param="thread")
        if self.messages[-1].role == "assistant":
            problem = "messages: an assistant's message is not continued; end with a user's"
            raise RequestError(problem, param="messages")
        system = [block for block in self.system if not block.all_text.startswith(BILLING)]
        given = [("system", system), *((one.role, one.content) for one in self.messages)]
        kind = self.tool_choice.get("type")
        choice: Any = "required" if kind == "any" else kind
        if kind == "tool":
            choice = {"type": "function", "function": {"name": self.tool_choice.get("name")}}
        thinking = self.thinking.get("type")
        return {
            "messages": join_items(given),
            "tools": function_tools(self.tools, kind="custom", schema="input_schema"),
            "tool_choice": choice,
            "parallel_tool_calls": not self.tool_choice.get("disable_parallel_tool_use"),
            "reasoning_effort": self.output_config.get("effort"),
            "response_format": answer_format(self.output_config.get("format")),
            "chat_template_kwargs": thinking and {"enable_thinking": thinking != "disabled"},
        }


class MessagesRequest(PromptBody):
    """A body of /v1/messages."""

    max_tokens: Whole

    def chat_fields(self) -> dict[str, Any]:
        return super().chat_fields() | {"max_tokens": self.max_tokens}


BLOCKS: dict[ItemKind, tuple[dict[str, Any], str, str]] = {
    "reasoning": ({"type": "thinking", "thinking": "", "signature": ""}, "thinking", "thinking"),
    "text": ({"type": "text", "text": ""}, "text", "text"),
    "call": ({"type": "tool_use", "input": {}}, "input_json", "partial_json"),
}
"""First fields of a block, kind of its deltas, and the field that has their text."""
STOP_REASONS = {FinishReason.STOP: "end_turn", FinishReason.TOOL_CALLS: "tool_use"}


class MessagesResponse(ItemizedResponse):
    """Responses of /v1/messages."""

    answers = "content"

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._reasons: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def _block_event(self, name: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"content_block_{name}", "index": len(self.items) - 1, **fields}

    def start(self) -> Iterable[dict[str, Any]]:
        yield {"type": "message_start", "message": self.response()}

    def begin_item(self, kind: ItemKind, call: ToolCall | None) -> Iterable[dict[str, Any]]:
        named = {} if call is None else {"id": call.id, "name": call.name}
        self.items.append(BLOCKS[kind][0] | named)
        yield self._block_event("start", content_block=self.items[-1])

    def add_text(self, kind: ItemKind, text: str) -> Iterable[dict[str, Any]]:
        _, name, key = BLOCKS[kind]
        if kind == "call":
            self.items[-1]["input"] = json.loads(text)
        else:
            self.items[-1][key] += text
        yield self._block_event("delta", delta={"type": f"{name}_delta", key: text})

    def end_item(self, kind: ItemKind, reason: FinishReason) -> Iterable[dict[str, Any]]:  # noqa: ARG002
        yield self._block_event("stop")

    def finish(self, reason: FinishReason) -> Iterable[dict[str, Any]]:
        found = self.stream.choices[0].stop_string
        self._reasons["stop_reason"] = STOP_REASONS.get(reason, "max_tokens")
        given = self._body.model_extra.get("stop_sequences", ())
        if found in ([given] if isinstance(given, str) else given):
            self._reasons = {"stop_reason": "stop_sequence", "stop_sequence": found}
        usage = self.response()["usage"]
        yield {"type": "message_delta", "delta": self._reasons, "usage": usage}
        yield {"type": "message_stop"}

    def failure(self, error: RequestError) -> Iterable[dict[str, Any]]:
        yield error.anthropic_body()

    def response(self) -> dict[str, Any]:
        usage, num_reused = self._usage(), self.stream.count_reused()
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._info.name,
            "content": self.items,
            **self._reasons,
            "usage": {
                "input_tokens": usage["prompt_tokens"] - num_reused,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": num_reused,
                "output_tokens": usage["completion_tokens"],
            },
        }
