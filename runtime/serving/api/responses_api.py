"""OpenAI's Responses API without its storage: a response is forgotten once it is sent."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator

from runtime.generation.answer import FinishReason
from runtime.serving.answers.answer_parser import ToolCall
from runtime.serving.api.body_fields import TEXT, UNSUPPORTED, Items, JsonObject, Text
from runtime.serving.api.itemized_response import ItemizedResponse, ItemKind
from runtime.serving.api.schemas import OBJECT, kind_of_choice
from runtime.serving.api.translation import (
    ConversationItem,
    TranslatedBody,
    answer_format,
    function_tools,
    join_items,
    text_as,
)
from runtime.serving.errors import RequestError

KEEPS_NOTHING = "this server keeps no responses; send the whole conversation as input"


class InputItem(ConversationItem):
    type: str = "message"

    needed = {
        "message": ("role", "content"),
        "reasoning": (),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
    }


class ResponsesRequest(TranslatedBody):
    """A body of /v1/responses. `store` is ignored: clients set it, few read what is stored."""

    input: Annotated[Items[InputItem], text_as("content", role="user")]
    instructions: Text | None = None
    tool_choice: Annotated[
        Annotated[Text, TEXT] | Annotated[JsonObject, OBJECT], Discriminator(kind_of_choice)
    ] = "auto"
    reasoning: JsonObject = {}
    text: JsonObject = {}

    conversation = "input"
    paths = {
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "function": "<function>",
        "json_schema": "<json_schema>",
    }
    refused = {
        "background": KEEPS_NOTHING,
        "conversation": KEEPS_NOTHING,
        "previous_response_id": KEEPS_NOTHING,
        "n": UNSUPPORTED,
        "top_logprobs": UNSUPPORTED,
    }
    ignored_fields: ClassVar[frozenset[str]] = frozenset(refused) | {
        "client_metadata", "include", "max_tool_calls", "stream_options", "truncation",
    }  # fmt: skip

    def chat_fields(self) -> dict[str, Any]:
        messages, choice = join_items((item.role, [item]) for item in self.input), self.tool_choice
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        if isinstance(choice, dict):
            choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
        return {
            "messages": messages,
            "tools": function_tools(self.tools, kind="function", schema="parameters"),
            "tool_choice": choice,
            "reasoning_effort": self.reasoning.get("effort"),
            "response_format": answer_format(self.text.get("format")),
        }


ITEMS: dict[ItemKind, tuple[str, str, dict[str, Any]]] = {
    "reasoning": ("rs", "reasoning_text", {"type": "reasoning", "summary": []}),
    "text": ("msg", "output_text", {"type": "message", "role": "assistant"}),
    "call": ("fc", "function_call_arguments", {"type": "function_call", "arguments": ""}),
}
"""Prefix of the id, name in events, and first fields of an item."""
CUT = (FinishReason.LENGTH, FinishReason.ABORT)


class ResponsesResponse(ItemizedResponse):
    """Responses of /v1/responses."""

    answers = "output"

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._status = "in_progress"
        self._num_events = 0

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": name, "sequence_number": self._num_events - 1, **fields}

    def _item_event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        return self._event(f"response.{name}", output_index=len(self.items) - 1, **fields)

    def _part_event(self, kind: ItemKind, name: str, /, **fields: Any) -> dict[str, Any]:
        """An event about what the last item has written, as its only part if it is no call."""
        part: dict[str, Any] = {} if kind == "call" else {"content_index": 0}
        if kind == "text" and name.startswith("output_text"):
            part["logprobs"] = []
        return self._item_event(name, item_id=self.items[-1]["id"], **part, **fields)

    def start(self) -> Iterable[dict[str, Any]]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self.response())

    def begin_item(self, kind: ItemKind, call: ToolCall | None) -> Iterable[dict[str, Any]]:
        prefix, name, fields = ITEMS[kind]
        item = {"id": f"{prefix}_{self._id}_{len(self.items)}", "status": "in_progress", **fields}
        self.items.append(item)
        if call is not None:
            item |= {"call_id": call.id, "name": call.name}
            yield self._item_event("output_item.added", item=item)
        else:
            item["content"] = []
            yield self._item_event("output_item.added", item=item)
            more: Any = {"annotations": [], "logprobs": []} if kind == "text" else {}
            item["content"] = [{"type": name, "text": "", **more}]
            yield self._part_event(kind, "content_part.added", part=item["content"][0])

    def add_text(self, kind: ItemKind, text: str) -> Iterable[dict[str, Any]]:
        item = self.items[-1]
        if kind == "call":
            item["arguments"] += text
        else:
            item["content"][0]["text"] += text
        yield self._part_event(kind, f"{ITEMS[kind][1]}.delta", delta=text)

    def end_item(self, kind: ItemKind, reason: FinishReason) -> Iterable[dict[str, Any]]:
        item, name = self.items[-1], f"{ITEMS[kind][1]}.done"
        item["status"] = "incomplete" if reason in CUT else "completed"
        if kind == "call":
            yield self._part_event(kind, name, arguments=item["arguments"], name=item["name"])
        else:
            yield self._part_event(kind, name, text=item["content"][0]["text"])
            yield self._part_event(kind, "content_part.done", part=item["content"][0])
        yield self._item_event("output_item.done", item=item)

    def finish(self, reason: FinishReason) -> Iterable[dict[str, Any]]:
        self._status = "incomplete" if reason in CUT else "completed"
        yield self._event(f"response.{self._status}", response=self.response())

    def failure(self, error: RequestError) -> Iterable[dict[str, Any]]:
        yield self._event("error", code=error.code, message=str(error), param=error.param)
        self._status = "failed"
        failed = {"error": {"code": "server_error", "message": str(error)}}
        yield self._event("response.failed", response=self.response() | failed)

    def response(self) -> dict[str, Any]:
        sampling, body, usage = self.stream.request.prompts[0].sampling, self._body, self._usage()
        is_cut = self._status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "model": self._info.name,
            "output": self.items,
            "parallel_tool_calls": body.model_extra.get("parallel_tool_calls") is not False,
            "store": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self.num_reasoning},
                "total_tokens": usage["total_tokens"],
            },
        }
