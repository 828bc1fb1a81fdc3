"""How one answer is to be generated, as the engine thread is told."""

from collections.abc import Mapping
from dataclasses import dataclass, field

GREEDY_BELOW = 1e-5
"""Temperatures below are greedy: dividing logits by less overflows float32."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Defaults are OpenAI's."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides (or multiplies, below 0) the logits of all tokens so far, the prompt's too."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it was generated."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of a token that was generated."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    """No end of text before."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """What ends the answer, the model's own end-of-text tokens among them."""
    num_logprobs: int | None = None
    """Most likely tokens told beside each token's own log-probability; none: nothing is told."""
    prompt_logprobs: bool = False
    """Also of the prompt's tokens."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class TokenLogprob:
    """Of raw logits, before penalties and temperature; natural logarithm."""

    token: int
    logprob: float | None
    """None for a text's first token, which nothing foretells."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens, best first."""
