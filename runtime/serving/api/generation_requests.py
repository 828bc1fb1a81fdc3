"""Turns valid request bodies into generation requests, within the model's and server's limits."""

import inspect
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from runtime.errors import ChatError
from runtime.generation.chat_template import render
from runtime.generation.detokenizer import decode
from runtime.generation.sampling import SamplingParams
from runtime.serving.answers.answer_parser import AnswerParser, AnswerReader
from runtime.serving.api.answer_grammar import chat_grammar, completion_grammar
from runtime.serving.api.chat_messages import ChatMessage
from runtime.serving.api.schemas import (
    SEED_BITS,
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    TemplateOptions,
    TokenizeRequest,
)
from runtime.serving.config import ServeConfig
from runtime.serving.errors import ContextTooLong, RequestError, UnknownModel
from runtime.serving.served_model import RECOMMENDED_OPTIONS, ModelInfo

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of a completion without it (OpenAI's API reference)."""

SAMPLING_OPTIONS = (*RECOMMENDED_OPTIONS, "frequency_penalty", "presence_penalty")
"""Options that are passed on unchanged."""

RESERVED_OPTIONS = {
    "messages",
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
}
"""Arguments of Transformers that are not variables of a chat template."""

MAX_ECHO_LOGIT_BYTES = 1 << 30
"""Most memory for the logits of one prompt, when `echo` asks for all of them."""

MAX_LOGPROBS_PER_REQUEST = 1 << 19
"""Log-probabilities of all tokens of a request's answers: 100 MiB while they are generated."""


@dataclass(frozen=True, kw_only=True)
class RequestPrompt:
    tokens: list[int]
    sampling: SamplingParams
    """Options of its answers, which differ by their seeds alone."""
    echoed: str = ""
    """The prompt's text, if the answer shall begin with it."""

    @property
    def num_logprobs(self) -> int:
        """Most log-probabilities that one answer may report."""
        if self.sampling.num_logprobs is None:
            return 0
        num_echoed = len(self.tokens) if self.sampling.prompt_logprobs else 0
        return (num_echoed + self.sampling.max_new_tokens) * (1 + self.sampling.num_logprobs)


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Prompts to answer `num_choices` times each.

    Raises:
        RequestError: the answers may have too many log-probabilities.
    """

    prompts: list[RequestPrompt]
    num_choices: int
    reader: Callable[[], AnswerReader] = AnswerReader
    """Makes the reader of one answer."""

    def __post_init__(self) -> None:
        if self.num_logprobs > MAX_LOGPROBS_PER_REQUEST:
            raise RequestError(
                f"logprobs: the answers may have {self.num_logprobs} log-probabilities; this "
                f"server allows at most {MAX_LOGPROBS_PER_REQUEST}; ask for fewer "
                "log-probabilities, or lower max_tokens or n, or send fewer or shorter prompts",
                param="logprobs",
            )

    def sampling_params(self, prompt_index: int, number: int) -> SamplingParams:
        """Options of one answer to a prompt."""
        sampling = self.prompts[prompt_index].sampling
        seed = (sampling.seed + number) % 2**SEED_BITS if number else sampling.seed
        return replace(sampling, seed=seed)

    @property
    def num_logprobs(self) -> int:
        """Most log-probabilities that all answers may report."""
        return self.num_choices * sum(prompt.num_logprobs for prompt in self.prompts)


def parse_completion(
    body: CompletionRequest, info: ModelInfo, limits: ServeConfig
) -> GenerationRequest:
    """Read a completion's prompts and options.

    Raises:
        RequestError: the subclass names the cause.
    """
    check_limits(body, info, limits)
    is_single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    given: list[Any] = [body.prompt] if is_single else body.prompt  # type: ignore[assignment]
    # Counted before any prompt is encoded, which may take minutes for a body of tiny ones.
    num_choices = len(given) * (body.n or 1)
    if num_choices > limits.max_accepted:
        raise RequestError(
            f"prompt: {num_choices} answers in one request exceed this server's limit of "
            f"{limits.max_accepted}; send fewer prompts at once",
            param="prompt",
        )
    wanted = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_logprobs = bool(body.echo) and body.logprobs is not None
    common = resolve_sampling(body, info, num_logprobs=body.logprobs)
    prompts = []
    for prompt in given:
        tokens, echoed = encode_prompt(prompt, body, info)
        max_tokens = resolve_max_tokens(len(tokens), info, limits, wanted)
        if prompt_logprobs and len(tokens) * info.logit_bytes > MAX_ECHO_LOGIT_BYTES:
            raise ContextTooLong(
                f"prompt: the logits of {len(tokens)} tokens take more than "
                f"{MAX_ECHO_LOGIT_BYTES} bytes; use shorter prompts with echo and logprobs",
                param="prompt",
            )
        sampling = replace(common, max_new_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        prompts.append(RequestPrompt(tokens=tokens, sampling=sampling, echoed=echoed))
    grammar = completion_grammar(body, info)
    prompts = [replace(one, sampling=replace(one.sampling, grammar=grammar)) for one in prompts]
    return GenerationRequest(prompts=prompts, num_choices=body.n or 1)


def parse_chat(
    body: ChatRequest, info: ModelInfo, limits: ServeConfig, *, param: str = "messages"
) -> GenerationRequest:
    """Render a chat's messages with the model's template and read its options.

    Args:
        param: the field of the client's request that has the messages.

    Raises:
        RequestError: the subclass names the cause.
    """
    check_limits(body, info, limits)
    tokens = render_messages(body.messages, body, info, param=param)
    require_tokens(tokens, info, param=param)
    wanted = body.max_completion_tokens or body.max_tokens
    form, tools = info.answer_format, body.offered_tools
    prefix = "" if form is None else form.prefix(tokens, info.tokenizer)
    sampling = resolve_sampling(
        body,
        info,
        max_new_tokens=resolve_max_tokens(len(tokens), info, limits, wanted, param=param),
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        more_stops=info.end_of_turn.strings,
        more_stop_ids=info.end_of_turn.token_ids,
    )
    sampling = replace(sampling, grammar=chat_grammar(body, info, prefix))
    make_reader: Callable[[], AnswerReader] = AnswerReader
    if form is not None and (form.has_reasoning or (tools and form.has_calls)):
        sampling = replace(sampling, shown_token_ids=form.token_ids)
        max_calls = 1 if body.parallel_tool_calls is False else None
        names = None if form.marks_calls else {tool["function"]["name"] for tool in tools}

        def make_reader() -> AnswerReader:
            parser = AnswerParser(form.parser(prefix, tools), names=names)
            return AnswerReader(parser, max_calls=max_calls)

    prompts = [RequestPrompt(tokens=tokens, sampling=sampling)]
    return GenerationRequest(prompts=prompts, num_choices=body.n or 1, reader=make_reader)


def check_limits(body: GenerationBody, info: ModelInfo, limits: ServeConfig) -> None:
    """Raise RequestError for options that are invalid with any prompt."""
    require_model(body.model, info)
    most = min(limits.max_choices, limits.max_accepted)
    if (body.n or 1) > most:
        raise RequestError(f"n={body.n}: this server allows at most {most}", param="n")


def require_model(name: str | None, info: ModelInfo, *, param: str | None = "model") -> None:
    """Raise UnknownModel if a request names another model."""
    if not info.is_named(name):
        raise UnknownModel(
            f"unknown model {name!r:.200}; this server has {info.name!r} (served_name=NAME,* "
            "makes it accept others)",
            param=param,
        )


def encode_prompt(
    prompt: str | list[int], body: CompletionRequest, info: ModelInfo
) -> tuple[list[int], str]:
    """Tokens of a prompt, and its text if the answer shall begin with it."""
    if isinstance(prompt, str):
        tokens = encode_text(prompt, info, add_special_tokens=body.add_special_tokens)
    else:
        tokens = prompt
    require_tokens(tokens, info, param="prompt")
    if not tokens:
        raise RequestError("prompt: it is empty; send at least one token", param="prompt")
    if not body.echo:
        return tokens, ""
    return tokens, prompt if isinstance(prompt, str) else decode_tokens(prompt, info)


def render_messages(
    messages: list[ChatMessage],
    options: TemplateOptions,
    info: ModelInfo,
    *,
    param: str = "messages",
) -> list[int]:
    """Token ids of messages and tools, as the model's chat template writes them.

    Raises:
        RequestError: the template has no tools, refuses the messages, or does not have the options.
    """
    tools = options.offered_tools
    if tools and not info.tool_template.takes_tools:
        raise RequestError(
            "tools: this model's chat template has no tools; leave them out", param="tools"
        )
    if not info.tool_template.takes_calls and any(message.tool_calls for message in messages):
        raise RequestError(
            f"{param}: this model's chat template has no tool calls; leave them out", param=param
        )
    for name in options.template_options:
        if name in RESERVED_OPTIONS:
            path = f"chat_template_kwargs.{name}"
            raise RequestError(f"{path}: the server sets it; leave it out", param=path)
    try:
        return render(
            info.tool_template.messages(messages),
            info.tokenizer,
            check_text=partial(require_text_length, info=info, param=param),
            tools=tools,
            options=options.template_options,
        )
    except ChatError as error:
        raise RequestError(f"{param}: {error}", param=param) from error


def encode_text(text: str, info: ModelInfo, *, add_special_tokens: bool) -> list[int]:
    require_text_length(text, info, param="prompt")
    encoding = info.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    return list(encoding["input_ids"])


def decode_tokens(tokens: list[int], info: ModelInfo) -> str:
    """Decode as answers are decoded, but keep special tokens: they belong to the given text."""
    return decode(tokens, info.tokenizer)


def require_tokens(tokens: list[int], info: ModelInfo, *, param: str) -> None:
    """Raise RequestError if a token is not in the vocabulary."""
    largest = max(tokens, default=0)
    if largest >= info.vocab_size:
        raise RequestError(
            f"{param}: token {largest} is not in the model's vocabulary of {info.vocab_size}",
            param=param,
        )


def require_length(tokens: list[int], info: ModelInfo, *, param: str) -> None:
    """Raise ContextTooLong if there are more tokens than the model can have in one answer."""
    limit = info.context_length
    if limit is not None and len(tokens) > limit:
        raise ContextTooLong(
            f"{param}: {len(tokens)} tokens; this model's context length is {limit}", param=param
        )


def require_text_length(text: str, info: ModelInfo, *, param: str) -> None:
    """Raise ContextTooLong for a text that has too many tokens, however it is encoded.

    Encoding takes a second and 100 MiB for each megabyte.
    """
    limit = info.context_length
    if limit is None or info.max_token_bytes is None:
        return
    num_bytes = len(text.encode())
    if num_bytes > limit * info.max_token_bytes:
        raise ContextTooLong(
            f"{param}: {num_bytes} bytes of text are more than {num_bytes // info.max_token_bytes} "
            f"tokens; this model's context length is {limit}",
            param=param,
        )


def tokenize_body(body: TokenizeRequest, info: ModelInfo) -> list[int]:
    """Token ids of a text or of messages."""
    require_model(body.model, info)
    if body.messages is not None:
        return render_messages(body.messages, body, info)
    assert body.prompt is not None
    return encode_text(body.prompt, info, add_special_tokens=body.add_special_tokens)


def resolve_max_tokens(
    num_prompt: int,
    info: ModelInfo,
    limits: ServeConfig,
    max_tokens: int | None,
    *,
    param: str = "prompt",
) -> int:
    """Most tokens that the answer may have: what fits, and what the server allows, if that is less.

    As vLLM does: many clients send the limit of another model.

    Args:
        max_tokens: the request's; None: as many as fit.
        param: the field with the prompt.

    Raises:
        ContextTooLong: the prompt leaves no room for an answer.
    """
    max_tokens = limits.max_new_tokens if max_tokens is None else max_tokens
    max_length = info.max_length
    if max_length is None:
        return min(max_tokens, limits.max_new_tokens)
    if num_prompt + min(max_tokens, 1) > max_length:
        is_context = max_length == info.context_length
        limit = "this model's context length is" if is_context else "kv_budget allows at most"
        raise ContextTooLong(
            f"{param}: {limit} {max_length} tokens, answer included, but the prompt has "
            f"{num_prompt}; shorten it",
            param=param,
        )
    return min(max_tokens, limits.max_new_tokens, max_length - num_prompt)


def resolve_sampling(
    body: GenerationBody,
    info: ModelInfo,
    *,
    num_logprobs: int | None,
    max_new_tokens: int = 0,
    more_stops: tuple[str, ...] = (),
    more_stop_ids: tuple[int, ...] = (),
) -> SamplingParams:
    """The request's options; else the model's recommended ones, else OpenAI's defaults."""
    given = {name: getattr(body, name) for name in SAMPLING_OPTIONS}
    options: dict[str, Any] = {
        **info.default_sampling,
        **{name: value for name, value in given.items() if value is not None},
    }
    options["top_k"] = max(0, int(options.get("top_k", 0)))
    stop_ids = {*(body.stop_token_ids or ())}
    require_tokens(list(stop_ids), info, param="stop_token_ids")
    # A special token never appears in the text: a stop string that is one stops on its id.
    stop_ids |= {info.special_tokens[stop] for stop in body.stops if stop in info.special_tokens}
    if not body.ignore_eos:
        stop_ids |= {*info.eos_token_ids, *more_stop_ids}
    if body.min_tokens and len(stop_ids) >= info.vocab_size:
        raise RequestError(
            f"stop_token_ids: they are the whole vocabulary, of which min_tokens={body.min_tokens} "
            "leaves no token; send fewer",
            param="stop_token_ids",
        )
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        logit_bias=parse_logit_bias(body, info),
        min_tokens=body.min_tokens or 0,
        stop=(*body.stops, *more_stops),
        stop_token_ids=frozenset(stop_ids),
        num_logprobs=num_logprobs,
        seed=secrets.randbits(SEED_BITS) if body.seed is None else body.seed,
        **options,
    )


def parse_logit_bias(body: GenerationBody, info: ModelInfo) -> dict[int, float]:
    """The request's biases by token id."""
    biases = {}
    for key, bias in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= len(str(info.vocab_size))):
            raise RequestError(f"logit_bias: {key!r:.40} is not a token id", param="logit_bias")
        biases[int(key)] = bias
    require_tokens(list(biases), info, param="logit_bias")
    return biases
