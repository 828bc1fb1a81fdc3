"""What is done to logits before a token is drawn, in order; `generate` calls it every token.

Shape suffixes: B rows (always 1), T tokens so far, V vocabulary.
"""

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from runtime.serving.sampling import Sampling, TokenLogprob


def processors_of(
    sampling: Sampling, *, num_prompt: int, recorder: "Recorder | None", device: torch.device
) -> LogitsProcessorList:
    """Recording first, so that what is told is the model's own distribution.

    Temperature, top-k, top-p and min-p are `generate`'s own and come behind these.
    """
    chosen = LogitsProcessorList()
    if recorder is not None:
        chosen.append(recorder)
    if sampling.repetition_penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.frequency_penalty or sampling.presence_penalty:
        chosen.append(CountPenalty(sampling, num_prompt=num_prompt))
    if sampling.logit_bias:
        chosen.append(Bias(sampling, device=device))
    if sampling.min_tokens and sampling.stop_token_ids:
        chosen.append(
            MinNewTokensLengthLogitsProcessor(
                num_prompt, sampling.min_tokens, sorted(sampling.stop_token_ids), device=str(device)
            )
        )
    return chosen


class Recorder(LogitsProcessor):
    """Keeps the log-probabilities of the token that is about to be drawn."""

    def __init__(self, num_top: int):
        self._num_top = num_top
        self._row_V: Tensor | None = None

    def __call__(self, _input_ids: Tensor, scores: Tensor) -> Tensor:
        self._row_V = torch.log_softmax(scores[0].float(), dim=-1)
        return scores

    def take(self, token: int) -> TokenLogprob:
        """Of the token that was drawn."""
        assert self._row_V is not None
        row_V, self._row_V = self._row_V, None
        return told(row_V, token, self._num_top)


class CountPenalty(LogitsProcessor):
    """logit - count * frequency_penalty - [count > 0] * presence_penalty, count being how often
    the token was generated (OpenAI's API reference, "Frequency and presence penalties").
    """

    def __init__(self, sampling: Sampling, *, num_prompt: int):
        self._frequency = sampling.frequency_penalty
        self._presence = sampling.presence_penalty
        self._num_prompt = num_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens, counts = input_ids[0, self._num_prompt :].unique(return_counts=True)
        scores = scores.clone()
        scores[0, tokens] -= self._frequency * counts + self._presence
        return scores


class Bias(LogitsProcessor):
    """Adds to the logits of some tokens."""

    def __init__(self, sampling: Sampling, *, device: torch.device):
        self._tokens = torch.tensor(list(sampling.logit_bias), device=device)
        self._biases = torch.tensor(list(sampling.logit_bias.values()), device=device)

    def __call__(self, _input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[0, self._tokens] += self._biases
        return scores


def told(row_V: Tensor, token: int, num_top: int) -> TokenLogprob:
    """A token's log-probability, and the most likely tokens at its place."""
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, tokens = row_V.topk(min(num_top, len(row_V)))
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(row_V[token]), top)


def prompt_logprobs(logits_TV: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprob]:
    """Of every token of a text, the first one's unknown: row t foretells token t + 1.

    Row by row: all rows in float32 would take twice what half-precision logits take.
    """
    found = [TokenLogprob(tokens[0], None)]
    for row_V, token in zip(logits_TV, tokens[1:], strict=False):
        found.append(told(torch.log_softmax(row_V.float(), dim=-1), token, num_top))
    return found
