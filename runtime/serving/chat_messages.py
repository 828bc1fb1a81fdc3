"""Messages of a chat, in OpenAI's shape and as clients send the answers of other servers back."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, model_validator

from runtime.generation.messages import TEXT_PARTS
from runtime.serving.body_fields import (
    FIRST_ERROR,
    LIST,
    MAX_ITEMS,
    TEXT,
    FieldError,
    RequestBody,
    Text,
    at_most,
    kind_of_list,
)

HINTS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Other providers' advice on what to cache."""


class TextPart(RequestBody):
    type: Literal["text", "input_text", "output_text"]
    text: Text

    ignored_fields: ClassVar[frozenset[str]] = HINTS | {"annotations"}

    @classmethod
    def check_fields(cls, fields: Mapping[str, Any]) -> None:
        kind = fields.get("type")
        if isinstance(kind, str) and kind not in TEXT_PARTS:
            # The part's content is in a field with the name of its type.
            field = kind if kind in fields else "type"
            raise FieldError("the model reads text only; send parts of type 'text'", field=field)


Content = Annotated[
    Annotated[Text, TEXT]
    | Annotated[list[TextPart], FIRST_ERROR, Field(min_length=1), at_most(MAX_ITEMS), LIST],
    Discriminator(kind_of_list),
]


class ChatMessage(RequestBody):
    """A message of a chat; `name` is ignored, as chat templates know roles only."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None

    ignored_fields: ClassVar[frozenset[str]] = HINTS | {
        "annotations", "id", "provider_specific_fields", "reasoning", "reasoning_content",
        "reasoning_details", "refusal", "thinking_blocks",
    }  # fmt: skip
    """What answers carry, and clients echo, that is no part of the conversation."""

    @classmethod
    def check_fields(cls, fields: Mapping[str, Any]) -> None:
        for name in ("audio", "function_call", "tool_calls"):
            if fields.get(name):
                raise FieldError("is not supported by this server; leave it out", field=name)

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise FieldError(f"a message of role {self.role!r} needs a text", field="content")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


def bound_parts(given: Any) -> Any:
    """Reject messages with more than `MAX_ITEMS` parts together, before any is validated."""
    if isinstance(given, list):
        contents = [message.get("content") for message in given if isinstance(message, dict)]
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        if num_parts > MAX_ITEMS:
            raise ValueError(f"they have {num_parts} parts; at most {MAX_ITEMS} are allowed")
    return given


Messages = Annotated[
    list[ChatMessage],
    FIRST_ERROR,
    Field(min_length=1),
    BeforeValidator(bound_parts),
    at_most(MAX_ITEMS),
]
