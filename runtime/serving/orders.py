"""From a request that is well-formed to what the engine is asked for, or why it can not be."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.generation.chat_template import render
from runtime.generation.detokenizer import Detokenizer
from runtime.serving.errors import ContextTooLong, RequestError, UnknownModel
from runtime.serving.facts import SAMPLING, Facts
from runtime.serving.sampling import Sampling
from runtime.serving.schemas import (
    SEED_BITS,
    ChatRequest,
    CompletionRequest,
    Message,
    Sampled,
    TokenizeRequest,
)

DEFAULT_COMPLETION = 16
"""Tokens of a completion that names no number (OpenAI's API reference)."""

SAMPLED = (*SAMPLING, "frequency_penalty", "presence_penalty")
"""Options that are passed on as they are."""

ECHO_LOGIT_BYTES = 1 << 30
"""The most memory that the logits of one prompt may take, when all of them are asked for."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the server is configured to allow a request."""

    max_new_tokens: int = 4096
    max_choices: int = 4
    max_stop: int = 4
    max_together: int = 72
    """Choices of one request in all: more can never run or wait."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    tokens: list[int]
    echoed: str = ""
    """Its text, where the answer shall begin with it."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Every prompt is answered `num_choices` times."""

    prompts: list[Prompt]
    samplings: list[Sampling]
    """One for each prompt, its seed left to `seed`."""
    num_choices: int
    seed: int

    def sampling(self, prompt: int, choice: int) -> Sampling:
        """That of one answer: answers to a prompt differ by their seeds alone."""
        seed = (self.seed + choice) % 2**SEED_BITS if choice else self.seed
        return Sampling(**{**vars(self.samplings[prompt]), "seed": seed})


def completion_order(request: CompletionRequest, facts: Facts, limits: Limits) -> Order:
    """Reads a completion's prompts and options.

    Raises:
        RequestError: of the kind that names the cause.
    """
    check(request, facts, limits)
    prompts = [encoded(prompt, request, facts) for prompt in prompts_of(request)]
    number = len(prompts) * (request.n or 1)
    if number > limits.max_together:
        raise RequestError(
            f"prompt: {number} answers at once are more than the {limits.max_together} that can "
            "run and wait here; send fewer prompts in one request",
            param="prompt",
        )
    samplings = []
    for prompt in prompts:
        budget = room(len(prompt.tokens), facts, limits, request.max_tokens)
        if request.max_tokens is None:
            budget = min(budget, DEFAULT_COMPLETION)
        with_prompt = bool(request.echo) and request.logprobs is not None
        if with_prompt and len(prompt.tokens) * facts.logit_bytes > ECHO_LOGIT_BYTES:
            raise ContextTooLong(
                f"prompt: the logits of {len(prompt.tokens)} tokens take more than "
                f"{ECHO_LOGIT_BYTES} bytes; ask for logprobs with echo of shorter prompts",
                param="prompt",
            )
        samplings.append(
            sampling_of(
                request,
                facts,
                max_new_tokens=budget,
                num_logprobs=request.logprobs,
                prompt_logprobs=with_prompt,
            )
        )
    return order(request, prompts, samplings)


def chat_order(request: ChatRequest, facts: Facts, limits: Limits) -> Order:
    """Writes a chat's messages as the model's template does, and reads its options.

    Raises:
        RequestError: of the kind that names the cause.
        ChatError: the template refuses the messages.
    """
    check(request, facts, limits)
    tokens = render(messages_of(request.messages), facts.tokenizer)
    told = request.max_completion_tokens or request.max_tokens
    sampling = sampling_of(
        request,
        facts,
        max_new_tokens=room(len(tokens), facts, limits, told),
        num_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        more_stops=facts.end_of_turn.strings,
        more_stop_ids=facts.end_of_turn.token_ids,
    )
    return order(request, [Prompt(tokens=tokens)], [sampling])


def order(request: Sampled, prompts: list[Prompt], samplings: list[Sampling]) -> Order:
    seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed
    return Order(prompts=prompts, samplings=samplings, num_choices=request.n or 1, seed=seed)


def check(request: Sampled, facts: Facts, limits: Limits) -> None:
    """Raises what is wrong whatever the prompt is."""
    require_model(request.model, facts)
    if (request.n or 1) > limits.max_choices:
        raise RequestError(f"n={request.n}: at most {limits.max_choices} here", param="n")
    if len(request.stops) > limits.max_stop:
        raise RequestError(
            f"stop: {len(request.stops)} strings; at most {limits.max_stop} here", param="stop"
        )


def require_model(name: str | None, facts: Facts) -> None:
    """Raises UnknownModel when another one is asked for."""
    if not facts.knows(name):
        raise UnknownModel(
            f"the model {name!r:.200} is not served here; {facts.name!r} is", param="model"
        )


def prompts_of(request: CompletionRequest) -> list[str] | list[list[int]]:
    """As a list, however it was given."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


def encoded(prompt: str | list[int], request: CompletionRequest, facts: Facts) -> Prompt:
    if isinstance(prompt, str):
        tokens = tokenized(prompt, facts, add_special_tokens=request.add_special_tokens)
        text = prompt
    else:
        require_tokens(prompt, facts, param="prompt")
        tokens, text = prompt, detokenized(prompt, facts) if request.echo else ""
    if not tokens:
        raise RequestError("prompt: it has no tokens, there is nothing to go on", param="prompt")
    return Prompt(tokens=tokens, echoed=text if request.echo else "")


def tokenized(text: str, facts: Facts, *, add_special_tokens: bool) -> list[int]:
    found = facts.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    return list(found["input_ids"])


def detokenized(tokens: list[int], facts: Facts) -> str:
    """As answers are written, but with special tokens: the text is what was given."""
    detokeniser = Detokenizer(facts.tokenizer, skip_special_tokens=False)
    return "".join([*map(detokeniser.push, tokens), detokeniser.end()])


def require_tokens(tokens: list[int], facts: Facts, *, param: str) -> None:
    """Raises RequestError when one is not in the vocabulary."""
    largest = max(tokens, default=0)
    if largest >= facts.vocab_size:
        raise RequestError(
            f"{param}: token {largest} is not among the model's {facts.vocab_size}", param=param
        )


def tokens_of(request: TokenizeRequest, facts: Facts) -> list[int]:
    """Of a text or of messages."""
    require_model(request.model, facts)
    if request.messages is not None:
        return render(messages_of(request.messages), facts.tokenizer)
    assert request.prompt is not None
    return tokenized(request.prompt, facts, add_special_tokens=request.add_special_tokens)


def messages_of(messages: list[Message]) -> list[Mapping[str, str]]:
    """As templates take them. OpenAI's newer name for the system's role is known to few."""
    return [
        {"role": "system" if one.role == "developer" else one.role, "content": one.text}
        for one in messages
    ]


def room(num_prompt: int, facts: Facts, limits: Limits, told: int | None) -> int:
    """Tokens that the answer may have.

    Args:
        told: what the request asks for; None: as many as there is room for.

    Raises:
        ContextTooLong: prompt and answer do not fit.
        RequestError: more than the server allows.
    """
    if told is not None and told > limits.max_new_tokens:
        raise RequestError(
            f"max_tokens={told}: at most {limits.max_new_tokens} here", param="max_tokens"
        )
    longest = facts.longest
    if longest is None:
        return limits.max_new_tokens if told is None else told
    least = 1 if told is None else told
    if num_prompt + least > longest:
        is_models = longest == facts.context
        whose = "this model's context is" if is_models else "caches have room here (kv_budget) for"
        raise ContextTooLong(
            f"{whose} {longest} tokens; the prompt has {num_prompt} and "
            f"{least} are to be generated: shorten the prompt or lower max_tokens",
            param="max_tokens" if num_prompt < longest else "prompt",
        )
    return min(limits.max_new_tokens, longest - num_prompt) if told is None else told


def sampling_of(
    request: Sampled,
    facts: Facts,
    *,
    max_new_tokens: int,
    num_logprobs: int | None,
    prompt_logprobs: bool = False,
    more_stops: tuple[str, ...] = (),
    more_stop_ids: tuple[int, ...] = (),
) -> Sampling:
    """The request's options; where it has none, the model's makers'.

    Where they have none, OpenAI's.
    """
    asked = {name: getattr(request, name) for name in SAMPLED}
    chosen: dict[str, Any] = {
        **facts.recommended,
        **{name: value for name, value in asked.items() if value is not None},
    }
    chosen["top_k"] = max(0, int(chosen.get("top_k", 0)))
    stop_ids = {*(request.stop_token_ids or ())}
    require_tokens(list(stop_ids), facts, param="stop_token_ids")
    # A special token never shows in the text, so a stop string that is one is heard as a token.
    stop_ids |= {facts.special[stop] for stop in request.stops if stop in facts.special}
    if not request.ignore_eos:
        stop_ids |= {*facts.end_ids, *more_stop_ids}
    return Sampling(
        max_new_tokens=max_new_tokens,
        logit_bias=biases(request, facts),
        min_tokens=request.min_tokens or 0,
        stop=(*request.stops, *more_stops),
        stop_token_ids=frozenset(stop_ids),
        num_logprobs=num_logprobs,
        prompt_logprobs=prompt_logprobs,
        **chosen,
    )


def biases(request: Sampled, facts: Facts) -> dict[int, float]:
    """By token id."""
    found = {}
    for key, bias in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= len(str(facts.vocab_size))):
            raise RequestError(f"logit_bias: {key!r:.40} is no token id", param="logit_bias")
        found[int(key)] = bias
    require_tokens(list(found), facts, param="logit_bias")
    return found
