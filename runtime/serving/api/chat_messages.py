"""Messages of a chat, in OpenAI's shape and as clients send the answers of other servers back."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, model_validator

from runtime.generation.messages import TEXT_PARTS
from runtime.serving.api.body_fields import (
    FIRST_ERROR,
    LIST,
    MAX_ITEMS,
    TEXT,
    UNSUPPORTED,
    FieldError,
    Item,
    Items,
    RequestBody,
    Text,
    at_most,
    kind_of_list,
)

HINTS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Other providers' advice on what to cache."""
ToolName = Annotated[Text, Field(min_length=1, max_length=128)]


class TextPart(RequestBody):
    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: Text

    ignored_fields: ClassVar[frozenset[str]] = HINTS | {"annotations", "citations", "logprobs"}

    @classmethod
    def check_fields(cls, fields: dict[str, Any]) -> None:
        kind = fields.get("type")
        if isinstance(kind, str) and kind not in TEXT_PARTS:
            # The part's content is in a field with the name of its type.
            field = kind if kind in fields else "type"
            raise FieldError("the model reads text only; send parts of type 'text'", field=field)


def join_parts(content: str | Sequence[TextPart] | None) -> str:
    """The text of a content."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


Content = Annotated[
    Annotated[Text, TEXT] | Annotated[Items[TextPart], LIST], Discriminator(kind_of_list)
]


class CalledFunction(RequestBody):
    name: ToolName
    arguments: Text = "{}"
    """JSON; templates that read objects get one."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})


class ToolCallMessage(RequestBody):
    """A call that an assistant's message made."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    ignored_fields: ClassVar[frozenset[str]] = HINTS | {
        "extra_content", "index", "provider_specific_fields",
    }  # fmt: skip


class ChatMessage(RequestBody):
    """A message of a chat; chat templates know the `name` of a tool only."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Items[ToolCallMessage] | None = None
    tool_call_id: Text | None = None

    ignored_fields: ClassVar[frozenset[str]] = HINTS | {
        "annotations", "audio", "function_call", "id", "parsed", "provider_specific_fields",
        "reasoning", "reasoning_details", "refusal", "thinking_blocks",
    }  # fmt: skip
    """Fields that answers carry, and clients echo, that are no part of the conversation."""

    @classmethod
    def check_fields(cls, fields: dict[str, Any]) -> None:
        for name in ("audio", "function_call"):
            if fields.get(name):
                raise FieldError(UNSUPPORTED, field=name)
        if fields.get("tool_calls") == []:
            del fields["tool_calls"]

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise FieldError(f"a message of role {self.role!r} needs a text", field="content")
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) is not None and self.role != role:
                raise FieldError(f"only a message of role {role!r} has it", field=name)
        return self

    @property
    def text(self) -> str:
        return join_parts(self.content)


def bound_parts(given: Any) -> Any:
    """Reject messages with more than `MAX_ITEMS` parts together, before any is validated."""
    if isinstance(given, list):
        contents = [message.get("content") for message in given if isinstance(message, dict)]
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        if num_parts > MAX_ITEMS:
            raise ValueError(f"they have {num_parts} parts; at most {MAX_ITEMS} are allowed")
    return given


Turns = Annotated[
    list[Item], FIRST_ERROR, Field(min_length=1), BeforeValidator(bound_parts), at_most(MAX_ITEMS)
]
"""The messages of a conversation."""
Messages = Turns[ChatMessage]
