"""Sampling parameters of one answer, and what `generate` needs to apply them.

Shape suffixes: B rows (always 1), T tokens so far, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from runtime.generation.constraint import CompiledGrammar, Constraint, GrammarMask

GREEDY_BELOW = 1e-5
"""Temperatures below are greedy: dividing logits by less overflows float32."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one answer; the defaults are OpenAI's."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides (or multiplies, below 0) the logits of all tokens so far, the prompt's included."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it was generated."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of a token that was generated."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    """Number of tokens before which the text cannot end."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer, including the model's end-of-text tokens."""
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens that are text, as they mark the parts of an answer."""
    num_logprobs: int | None = None
    """Number of most likely tokens to report with each token's log-probability; None: report no
    log-probabilities."""
    prompt_logprobs: bool = False
    """Report the log-probabilities of the prompt's tokens too."""
    grammar: CompiledGrammar | None = None
    """Grammar that the answer has to follow."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithms from the raw logits, before penalties and temperature."""

    token: int
    logprob: float | None
    """None for the first token of a text, which has no prediction."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens, best first."""


def token_logprob(row_V: Tensor, token: int, num_top: int) -> TokenLogprob:
    """A token's log-probability and the most likely tokens at its position."""
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, tokens = row_V.topk(min(num_top, len(row_V)))
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(row_V[token]), top)


def prompt_logprobs(logits_TV: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprob]:
    """Log-probabilities of every token of a text; row t of the logits predicts token t + 1.

    Works row by row: all rows in float32 would take twice the memory of half-precision logits.
    """
    entries = [TokenLogprob(tokens[0], None)]
    for row_V, token in zip(logits_TV, tokens[1:], strict=False):
        entries.append(token_logprob(torch.log_softmax(row_V.float(), dim=-1), token, num_top))
    return entries


def make_logits_processors(
    sampling: SamplingParams,
    *,
    num_prompt: int,
    recorder: "LogprobRecorder | None",
    constraint: Constraint | None = None,
    device: torch.device,
) -> LogitsProcessorList:
    """Processors in order; the recorder comes first and sees the model's own distribution.

    Temperature, top-k, top-p and min-p are `generate`'s own and run after these.
    """
    processors = LogitsProcessorList()
    if recorder is not None:
        processors.append(recorder)
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.frequency_penalty or sampling.presence_penalty:
        processors.append(CountPenalty(sampling, num_prompt=num_prompt))
    if sampling.logit_bias:
        biases = {(token,): float(bias) for token, bias in sampling.logit_bias.items()}
        processors.append(SequenceBiasLogitsProcessor(biases))
    if sampling.min_tokens and sampling.stop_token_ids:
        processors.append(
            MinNewTokensLengthLogitsProcessor(
                num_prompt, sampling.min_tokens, sorted(sampling.stop_token_ids), device=str(device)
            )
        )
    if constraint is not None:
        ends = sampling.stop_token_ids
        processors.append(GrammarMask(constraint, end_ids=ends, num_prompt=num_prompt))
    if not sampling.is_greedy:
        processors.append(FiniteScores())
    return processors


class LogprobRecorder(LogitsProcessor):
    """Keeps the log-probabilities of the token that is about to be drawn."""

    def __init__(self, num_top: int):
        self._num_top = num_top
        self._row_V: Tensor | None = None

    def __call__(self, _input_ids: Tensor, scores: Tensor) -> Tensor:
        self._row_V = torch.log_softmax(scores[0].float(), dim=-1)
        return scores

    def take(self, token: int) -> TokenLogprob:
        """Return and forget the log-probability of the token that was drawn."""
        assert self._row_V is not None
        row_V, self._row_V = self._row_V, None
        return token_logprob(row_V, token, self._num_top)


class CountPenalty(LogitsProcessor):
    """logit - count * frequency_penalty - [count > 0] * presence_penalty.

    `count` is how often the token was generated (OpenAI's API reference, "Frequency and presence
    penalties").
    """

    def __init__(self, sampling: SamplingParams, *, num_prompt: int):
        self._frequency = sampling.frequency_penalty
        self._presence = sampling.presence_penalty
        self._num_prompt = num_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens, counts = input_ids[0, self._num_prompt :].unique(return_counts=True)
        scores = scores.clone()
        scores[0, tokens] -= self._frequency * counts + self._presence
        return scores


class FiniteScores(LogitsProcessor):
    """Leaves the best token alone where nothing can be drawn: the scores have NaN or infinity.

    Damaged weights and extreme penalties give such scores; `torch.multinomial` refuses them. No
    function: the library looks at the signature of `__call__` for each token, which takes .2 ms for
    a function's.
    """

    def __call__(self, _input_ids: Tensor, scores: Tensor) -> Tensor:
        if torch.isfinite(scores.max()):  # NaN, too, is the maximum
            return scores
        best = scores.nan_to_num(nan=float("-inf")).argmax(dim=-1, keepdim=True)
        return torch.full_like(scores, float("-inf")).scatter_(1, best, 0.0)


def listen_to_tokens(on_token: Callable[[int], bool]) -> Callable[..., Tensor]:
    """Return a stopping criterion that calls `on_token` with each token; True ends the answer.

    `generate` asks it after each step. The first one draws one token; later ones several where
    drafted tokens were accepted.
    """
    num_seen: int | None = None

    def listen(input_ids: Tensor, _scores: Any, **_kwargs: Any) -> Tensor:
        nonlocal num_seen
        num_tokens = input_ids.shape[1]
        first = num_tokens - 1 if num_seen is None else num_seen
        num_seen = num_tokens
        is_last = any(on_token(token) for token in input_ids[0, first:].tolist())
        return torch.tensor([is_last], device=input_ids.device)

    return listen


def drawing_options(temperature: float, **more: Any) -> dict[str, Any]:
    """Options of `generate`: greedy at temperature 0, else drawn with `more` too."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, **more}


def make_generation_config(model: PreTrainedModel, sampling: SamplingParams) -> GenerationConfig:
    """Everything that the request decides; the rest is the model's own.

    `generate` fills in a value that is left out: with the model's, or with 50 for top_k. If no
    token ends the text, the stop token is one beyond the vocabulary.
    """
    stop_ids = sorted(sampling.stop_token_ids) or [model.config.get_text_config().vocab_size]
    return GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=stop_ids,
        pad_token_id=stop_ids[0],
        repetition_penalty=1.0,
        **drawing_options(
            0.0 if sampling.is_greedy else sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p or None,
        ),
    )
