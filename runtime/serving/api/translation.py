"""Requests of other APIs, as a chat's: fields that both have are passed on as they are."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi.exceptions import RequestValidationError
from pydantic import BeforeValidator, ConfigDict, ValidationError, model_validator

from runtime.serving.api.body_fields import (
    FIRST_ERROR,
    FieldError,
    JsonObject,
    RequestBody,
    Text,
    at_most,
)
from runtime.serving.api.chat_messages import HINTS, Content, ToolName, join_parts
from runtime.serving.api.generation_requests import (
    GenerationRequest,
    parse_chat,
    render_messages,
    require_model,
)
from runtime.serving.api.schemas import MAX_TOOLS, ChatRequest
from runtime.serving.config import ServeConfig
from runtime.serving.errors import RequestError
from runtime.serving.served_model import ModelInfo

CALLS = ("function_call", "tool_use")
RESULTS = ("function_call_output", "tool_result")
THOUGHTS = ("reasoning", "thinking", "redacted_thinking")
MESSAGE_PARTS = ("reasoning_content", "content", "tool_calls")
"""Parts of an assistant's message, in the order in which a model writes them."""


class ConversationItem(RequestBody):
    """An item of the Responses API, or a block of a message of Anthropic's."""

    type: str
    role: Literal["system", "developer", "user", "assistant"] | None = None
    text: Text | None = None
    content: Content | None = None
    summary: Content | None = None
    output: Content | None = None
    thinking: Text | None = None
    id: Text | None = None
    call_id: Text | None = None
    tool_use_id: Text | None = None
    name: ToolName | None = None
    arguments: Text | None = None
    input: JsonObject | None = None

    needed: ClassVar[Mapping[str, tuple[str, ...]]]
    """Types, with the fields that each needs."""
    ignored_fields: ClassVar[frozenset[str]] = HINTS | {
        "async", "caller", "citations", "data", "encrypted_content", "is_error", "namespace",
        "phase", "signature", "status", "toolset_name",
    }  # fmt: skip

    @classmethod
    def check_fields(cls, fields: dict[str, Any]) -> None:
        kind = fields.get("type")
        if isinstance(kind, str) and kind not in cls.needed:
            allowed = ", ".join(cls.needed)
            raise FieldError(f"{kind!r:.40} is not supported; it may be {allowed}", field="type")
        for name in ("content", "output", "summary"):
            if fields.get(name) == []:
                del fields[name]

    @model_validator(mode="after")
    def _check_needed(self) -> Self:
        for name in self.needed[self.type]:
            if getattr(self, name) is None:
                raise FieldError(f"what has the type {self.type!r} needs it", field=name)
        return self

    @property
    def all_text(self) -> str:
        return join_parts(self.text or self.thinking or self.output or self.content or self.summary)

    def call(self) -> dict[str, Any]:
        """A tool call, as a message has it."""
        arguments = json.dumps(self.input) if self.arguments is None else self.arguments
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.call_id or self.id, "type": "function", "function": function}


def text_as(field: str, **more: str) -> BeforeValidator:
    """Takes a text for a list of one item, which has it in this field."""
    return BeforeValidator(
        lambda given: [{field: given, **more}] if isinstance(given, str) else given
    )


def join_items(
    given: Iterable[tuple[str | None, Iterable[ConversationItem]]],
) -> list[dict[str, Any]]:
    """A chat's messages: what an assistant thinks, writes and calls in a row is one.

    Args:
        given: the items of each message with its role, where their types do not say it.
    """
    messages: list[dict[str, Any]] = []
    for given_role, items in given:
        between = "\n"
        for item in items:
            if item.type in RESULTS:
                id = item.call_id or item.tool_use_id
                messages.append({"role": "tool", "content": item.all_text, "tool_call_id": id})
                continue
            role: str | None = given_role
            part: str = "content"
            value: Any = item.all_text
            if item.type in CALLS:
                role, part, value = "assistant", "tool_calls", [item.call()]
            elif item.type in THOUGHTS:
                role, part = "assistant", "reasoning_content"
            # Blocks of text that follow one another are one text; messages stay what they are.
            later = MESSAGE_PARTS[MESSAGE_PARTS.index(part) + (item.type != "message") :]
            if not messages or messages[-1]["role"] != role or messages[-1].keys() & later:
                messages.append({"role": role})
            last = messages[-1]
            if part in last:
                value = last[part] + (between + value if isinstance(value, str) else value)
            last[part] = value
            between = ""
    return messages


def function_tools(tools: list[dict[str, Any]], *, kind: str, schema: str) -> list[dict[str, Any]]:
    """The tools of a chat. Those of other types, which a provider would run, are left out.

    Args:
        kind: the type of a function.
        schema: the field that has its parameters.
    """
    names = {"name": "name", "description": "description", "parameters": schema, "strict": "strict"}
    functions = [
        {name: tool[theirs] for name, theirs in names.items() if theirs in tool}
        for tool in tools
        if tool.get("type", kind) == kind
    ]
    return [{"type": "function", "function": function} for function in functions]


def answer_format(given: Any) -> Any:
    """A chat's `response_format` for theirs, which has the schema's fields itself."""
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        return given
    fields = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": fields}


class TranslatedBody(RequestBody):
    model_config = ConfigDict(extra="allow")

    stream: bool | None = None
    tools: Annotated[list[JsonObject], FIRST_ERROR, at_most(MAX_TOOLS)] = []

    conversation: ClassVar[str]
    """The field that has the messages."""
    paths: ClassVar[Mapping[str, str]]
    """Their names of a chat's fields, where they differ; what is in <> is not in their paths."""
    refused: ClassVar[Mapping[str, str]]
    """Fields that would change the answer, with the reason why they are errors."""

    @classmethod
    def check_fields(cls, fields: dict[str, Any]) -> None:
        for name, reason in cls.refused.items():
            if fields.get(name):
                raise FieldError(reason, field=name)

    @abstractmethod
    def chat_fields(self) -> dict[str, Any]:
        """The fields of a chat for those that it does not have."""

    def chat(self) -> ChatRequest:
        """The chat.

        Raises:
            RequestValidationError: it is invalid; by the paths of this body.
        """
        names = {theirs: name for name, theirs in self.paths.items()}
        given = {names.get(name, name): value for name, value in (self.model_extra or {}).items()}
        try:
            return ChatRequest.model_validate(given | self.chat_fields() | {"stream": self.stream})
        except ValidationError as error:
            problems: list[Any] = [
                {**one, "loc": ("body", *(self.paths.get(str(part), part) for part in one["loc"]))}
                for one in error.errors()
            ]
            raise RequestValidationError(problems) from error

    def their_path(self, path: str) -> str:
        """Their name of a schema in a chat."""
        path = path.replace("response_format.json_schema", "response_format", 1)
        path = path.replace("response_format", self.paths["response_format"], 1)
        parameters = self.paths.get("parameters", "parameters")
        return path.replace(".function.parameters", f".{parameters}", 1)


def parse_translated(
    body: TranslatedBody, info: ModelInfo, limits: ServeConfig
) -> GenerationRequest:
    """Read a body as a chat; raises what `parse_chat` raises, too."""
    try:
        return parse_chat(body.chat(), info, limits, param=body.conversation)
    except RequestError as error:
        if error.param is not None:
            path = body.their_path(error.param)
            error.args = (str(error).replace(error.param, path, 1),)
            error.param = path
        raise


def count_tokens(body: TranslatedBody, info: ModelInfo) -> int:
    """The number of tokens of the prompt."""
    chat = body.chat()
    require_model(chat.model, info)
    return len(render_messages(chat.messages, chat, info, param=body.conversation))
