"""Request bodies of OpenAI's API; a field that the server does not support is an error.

`generation_requests.py` checks the limits that depend on the model or on the server.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from predictors.records import Whole
from runtime.serving.api.body_fields import (
    FIRST_ERROR,
    LIST,
    MAX_ITEMS,
    TEXT,
    UNSUPPORTED,
    FieldError,
    Items,
    JsonObject,
    RequestBody,
    Text,
    at_most,
    kind_of_list,
)
from runtime.serving.api.chat_messages import HINTS, Messages, ToolName

SEED_BITS = 63
MAX_SEED = 2**SEED_BITS - 1
MAX_LOGPROBS = 20
MAX_STOPS = 4
"""OpenAI's limit."""
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIASES = 1024
MIN_REPETITION_PENALTY = 0.01
"""Logits divided by less overflow half precision."""
MAX_TOOLS = 512
MAX_TOKENS = 1 << 20
"""Tokens of a prompt; the model's context is the limit that counts."""
TOKENS, TOKEN_LISTS = Tag("<tokens>"), Tag("<token lists>")


def kind_of_prompt(given: Any) -> str:
    """Returns the tag of the only form that a prompt can have, by its first item."""
    if not isinstance(given, list):
        return TEXT.tag
    first = given[0] if given else None
    if isinstance(first, list):
        return TOKEN_LISTS.tag
    return LIST.tag if isinstance(first, str) else TOKENS.tag


TokenId = Annotated[int, Field(ge=0, le=MAX_SEED)]
Tokens = Annotated[list[TokenId], FIRST_ERROR, Field(min_length=1), at_most(MAX_TOKENS)]
StopString = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Choice = Annotated[Text, Field(min_length=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIASES), at_most(MAX_LOGIT_BIASES)]
Prompt = Annotated[
    Annotated[Text, TEXT]
    | Annotated[Tokens, TOKENS]
    | Annotated[Items[Text], LIST]
    | Annotated[Items[Tokens], TOKEN_LISTS],
    Discriminator(kind_of_prompt),
]
Stop = Annotated[
    Annotated[StopString, TEXT]
    | Annotated[list[StopString], FIRST_ERROR, at_most(MAX_STOPS), LIST],
    Discriminator(kind_of_list),
]

IGNORED_FIELDS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "cache_control", "parallel_tool_calls",
        "verbosity", "reasoning_effort",
    }
)  # fmt: skip
"""OpenAI's fields that do not change the answer of an open model: accepted and ignored."""

UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""OpenAI's and vLLM's fields that would change the answer, with the values that do not (null never
does)."""


class StreamOptions(RequestBody):
    include_usage: bool | None = None
    """Send the usage in a last chunk."""
    include_obfuscation: bool | None = None
    """Accepted and ignored."""


class JsonSchema(RequestBody):
    name: Text | None = None
    description: Text | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None
    """Accepted and ignored: every answer follows its schema."""


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            problem = "it belongs to type 'json_schema', which needs it"
            raise FieldError(problem, field="json_schema")
        return self


class StructuredOutputs(RequestBody):
    """vLLM's: one form that the answer has."""

    json_: JsonObject | Text | None = Field(None, alias="json")
    """A schema, or its text."""
    json_object: Literal[True] | None = None
    regex: Annotated[Text, Field(min_length=1)] | None = None
    choice: Items[Choice] | None = None
    grammar: Annotated[Text, Field(min_length=1)] | None = None
    """In Lark's form as llguidance reads it, or in GBNF."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise FieldError("give exactly one of json, json_object, regex, choice and grammar")
        return self


class GenerationBody(RequestBody):
    """Fields that completions and chats share."""

    model: Text | None = None
    max_tokens: Annotated[Whole, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=MAX_SEED)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=10)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Biases | None = None
    seed: Annotated[Whole, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    n: Annotated[Whole, Field(ge=1)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], FIRST_ERROR, at_most(MAX_ITEMS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[Whole, Field(ge=0)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    ignored_fields: ClassVar[frozenset[str]] = IGNORED_FIELDS | UNSUPPORTED_FIELDS.keys()

    @classmethod
    def check_fields(cls, fields: dict[str, Any]) -> None:
        for name, neutral in UNSUPPORTED_FIELDS.items():
            if name in fields.keys() - cls.model_fields.keys() and fields[name] not in neutral:
                raise FieldError(UNSUPPORTED, field=name)

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("it is only allowed with stream=true", field="stream_options")
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
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Whole | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            problem = "this server does not rank answers; leave it out, or set n to this number"
            raise FieldError(problem, field="best_of")
        return self


class ToolFunction(RequestBody):
    name: ToolName
    description: Text | None = None
    parameters: JsonObject | None = None
    """A schema in JSON Schema."""
    strict: bool | None = None
    """Constrain the arguments to the schema; other calls may have any."""


class Tool(RequestBody):
    type: Literal["function"]
    function: ToolFunction

    ignored_fields: ClassVar[frozenset[str]] = HINTS


class NamedFunction(RequestBody):
    name: ToolName


class NamedTool(RequestBody):
    type: Literal["function"]
    function: NamedFunction


OBJECT = Tag("<object>")


def kind_of_choice(given: Any) -> str:
    return OBJECT.tag if isinstance(given, dict) else TEXT.tag


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], TEXT] | Annotated[NamedTool, OBJECT],
    Discriminator(kind_of_choice),
]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplateOptions(RequestBody):
    """Values that a chat template reads besides the messages."""

    tools: Annotated[list[Tool], FIRST_ERROR, at_most(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: ReasoningEffort | None = None

    @model_validator(mode="after")
    def _check_tool_choice(self) -> Self:
        if self.must_call and not self.called_tools:
            names = [tool.function.name for tool in self.tools or []]
            problem = f"no tool has this name; got {names!r:.200}" if names else "there is no tool"
            raise FieldError(problem, field="tool_choice")
        return self

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "auto", "none")

    @property
    def called_tools(self) -> dict[int, ToolFunction]:
        """The tools that the answer may call, by their places in `tools`."""
        choice = self.tool_choice
        return {
            place: tool.function
            for place, tool in enumerate(self.tools or [])
            if choice != "none"
            and not (isinstance(choice, NamedTool) and choice.function.name != tool.function.name)
        }

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools
        ]

    @property
    def template_options(self) -> dict[str, Any]:
        """Variables of the chat template; one that knows no effort may know `enable_thinking`."""
        options: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            options["enable_thinking"] = False
        return options | (self.chat_template_kwargs or {})


class ChatRequest(TemplateOptions, GenerationBody):
    messages: Messages
    parallel_tool_calls: bool | None = None
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("it is only allowed with logprobs=true", field="top_logprobs")
        return self


class TokenizeRequest(TemplateOptions):
    """A text, or messages to render with the chat template."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("give exactly one of prompt and messages", field="prompt")
        return self


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Body of every response with status 400 and above, as `RequestError.body` writes it."""

    error: ErrorDetail


class DetokenizeRequest(RequestBody):
    model: Text | None = None
    tokens: Annotated[list[TokenId], FIRST_ERROR, at_most(MAX_TOKENS)]
