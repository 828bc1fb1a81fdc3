"""Requests as OpenAI's clients send them; what we can not honour is refused by its name.

Limits that the server is configured with are checked where requests are turned into orders.
"""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from runtime.serving.errors import RequestError

SEED_BITS = 63
LARGEST_SEED = 2**SEED_BITS - 1
MOST_LOGPROBS = 20
LONGEST_STOP = 1024
MOST_BIASES = 1024


def require_characters(text: str) -> str:
    """Raises ValueError for halves of characters, which JSON can spell and no encoding can."""
    text.encode()
    return text


Text = Annotated[str, AfterValidator(require_characters)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]
StopString = Annotated[Text, Field(min_length=1, max_length=LONGEST_STOP)]

HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "parallel_tool_calls", "verbosity",
        "reasoning_effort",
    }
)  # fmt: skip
"""OpenAI's fields that do not change what an open model answers: taken and not looked at."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
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
"""OpenAI's fields that would change it, and the values that do not (null is always one)."""


class Request(BaseModel):
    """A JSON object without keys that we do not know, every value of its own type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Request):
    include_usage: bool | None = None
    """A last chunk tells the usage."""
    include_obfuscation: bool | None = None
    """Taken and not looked at."""


class Sampled(Request):
    """What completions and chats share."""

    model: Text | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=LARGEST_SEED)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASES)
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-LARGEST_SEED - 1, le=LARGEST_SEED)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: StopString | list[StopString] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, neutral in NEUTRAL.items():
            value = given.get(name)
            if value is not None and value not in neutral:
                raise RequestError(
                    f"{name} is not supported by this server; leave it out", param=name
                )
        ours = cls.model_fields
        return {
            name: value
            for name, value in given.items()
            if name in ours or name not in HARMLESS | NEUTRAL.keys()
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


class CompletionRequest(Sampled):
    prompt: (
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise RequestError(
                f"best_of={self.best_of}: answers are not ranked here; leave it out, or ask for "
                "the same number with n",
                param="best_of",
            )
        return self


class TextPart(Request):
    type: Annotated[str, Field(pattern="^text$")]
    text: Text


class Message(Request):
    """Who speaks (`name`) is taken and not looked at: templates know roles only."""

    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Text | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        # Answers are sent back as they were received, with fields that hold nothing.
        ours = cls.model_fields
        return {name: one for name, one in given.items() if name in ours or one not in (None, [])}

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(Sampled):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(
                "top_logprobs is only allowed with logprobs=true", param="top_logprobs"
            )
        return self


class TokenizeRequest(Request):
    """Of a text, or of messages as the chat template writes them."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        return self


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """Every answer of 400 and above, as `runtime.serving.errors.error_body` writes it."""

    error: ErrorDetail


class DetokenizeRequest(Request):
    model: Text | None = None
    tokens: list[TokenId]
