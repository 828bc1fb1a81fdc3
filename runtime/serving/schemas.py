"""Request bodies of OpenAI's API; a field that the server does not support is an error.

`runtime.serving.generation_requests` checks the limits that depend on the model or on the server.
"""

from collections.abc import Sized
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from runtime.generation.messages import check_encodable
from runtime.serving.errors import RequestError

SEED_BITS = 63
MAX_SEED = 2**SEED_BITS - 1
MAX_LOGPROBS = 20
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIASES = 1024
MIN_REPETITION_PENALTY = 0.01
"""Logits divided by less overflow half precision."""
MAX_FIELDS = 100
"""Fields of an object, of which OpenAI's API has about forty."""
MAX_ITEMS = 4096
"""Items of a list other than tokens."""
MAX_TOKENS = 1 << 20
"""Tokens of a prompt; the model's context is the limit that counts."""


def at_most(limit: int) -> BeforeValidator:
    """Rejects what has more items, before any of them is validated.

    A body of a megabyte would otherwise become some hundred thousand errors, in seconds during
    which the server answers nobody.
    """

    def check(given: Any) -> Any:
        if isinstance(given, Sized) and len(given) > limit:
            raise ValueError(f"it has {len(given)} items; at most {limit} are allowed")
        return given

    return BeforeValidator(check)


def kind_of_prompt(given: Any) -> str:
    """Returns the tag of the only form that a prompt can have, by its first item."""
    if not isinstance(given, list):
        return "text"
    first = given[0] if given else None
    if isinstance(first, list):
        return "token-lists"
    return "texts" if isinstance(first, str) else "tokens"


def kind_of_list(given: Any) -> str:
    return "list" if isinstance(given, list) else "text"


FIRST_ERROR = Field(fail_fast=True)
"""Validation of a list ends at the first invalid item."""
Text = Annotated[str, AfterValidator(check_encodable)]
TokenId = Annotated[int, Field(ge=0, le=MAX_SEED)]
Tokens = Annotated[list[TokenId], FIRST_ERROR, Field(min_length=1), at_most(MAX_TOKENS)]
StopString = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[list[Text], FIRST_ERROR, Field(min_length=1), at_most(MAX_ITEMS), Tag("texts")]
    | Annotated[
        list[Tokens], FIRST_ERROR, Field(min_length=1), at_most(MAX_ITEMS), Tag("token-lists")
    ],
    Discriminator(kind_of_prompt),
]
Stop = Annotated[
    Annotated[StopString, Tag("text")]
    | Annotated[list[StopString], FIRST_ERROR, at_most(MAX_ITEMS), Tag("list")],
    Discriminator(kind_of_list),
]

IGNORED_FIELDS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "parallel_tool_calls", "verbosity",
        "reasoning_effort",
    }
)  # fmt: skip
"""OpenAI's fields that do not change the answer of an open model: accepted and ignored."""

UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "web_search_options": (),
}
"""OpenAI's fields that would change the answer, with the values that do not (null never does)."""
DROPPED_FIELDS = IGNORED_FIELDS | UNSUPPORTED_FIELDS.keys()


class RequestBody(BaseModel):
    """A JSON object without unknown keys and without type coercion."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        # First: whatever looks at each field would hold the event loop for many of them.
        if len(given) > MAX_FIELDS:
            raise ValueError(f"it has {len(given)} fields; at most {MAX_FIELDS} are allowed")
        return cls.drop_ignored(given)

    @classmethod
    def drop_ignored(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the object without the fields that are accepted and ignored."""
        return given


class StreamOptions(RequestBody):
    include_usage: bool | None = None
    """Send the usage in a last chunk."""
    include_obfuscation: bool | None = None
    """Accepted and ignored."""


class GenerationBody(RequestBody):
    """Fields that completions and chats share."""

    model: Text | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_SEED)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=10)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIASES),
            at_most(MAX_LOGIT_BIASES),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], FIRST_ERROR, at_most(MAX_ITEMS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def drop_ignored(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, neutral in UNSUPPORTED_FIELDS.items():
            value = given.get(name)
            if value is not None and value not in neutral:
                raise RequestError(
                    f"{name} is not supported by this server; leave it out", param=name
                )
        known = cls.model_fields
        return {
            name: value
            for name, value in given.items()
            if name in known or name not in DROPPED_FIELDS
        }

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is only allowed with stream=true", param="stream_options"
            )
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(GenerationBody):
    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise RequestError(
                f"best_of={self.best_of}: this server does not rank answers; leave it out, or set "
                "n to the same number",
                param="best_of",
            )
        return self


class TextPart(RequestBody):
    type: Annotated[str, Field(pattern="^text$")]
    text: Text


Content = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[TextPart], FIRST_ERROR, at_most(MAX_ITEMS), Tag("list")],
    Discriminator(kind_of_list),
]


class ChatMessage(RequestBody):
    """A message of a chat; `name` is ignored, as chat templates know roles only."""

    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None

    @classmethod
    def drop_ignored(cls, given: dict[str, Any]) -> dict[str, Any]:
        # Clients send answers back as they received them, including fields without a value.
        known = cls.model_fields
        return {
            name: value for name, value in given.items() if name in known or value not in (None, [])
        }

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


class ChatRequest(GenerationBody):
    messages: Messages
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(
                "top_logprobs is only allowed with logprobs=true", param="top_logprobs"
            )
        return self


class TokenizeRequest(RequestBody):
    """A text, or messages to render with the chat template."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give exactly one of prompt and messages", param="prompt")
        return self


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Body of every response with status 400 and above (`runtime.serving.errors.error_body`)."""

    error: ErrorDetail


class DetokenizeRequest(RequestBody):
    model: Text | None = None
    tokens: Annotated[list[TokenId], FIRST_ERROR, at_most(MAX_TOKENS)]
