"""The number of drafted tokens that a step verifies, from what steps have cost so far."""

from dataclasses import dataclass

LONGEST = 8
"""Most drafted tokens in a step."""

MEMORY = 0.9
"""Weight of the past in means over steps."""

ALLOWED_LOSS = 0.02
"""Share of the time that drafts may have cost in total."""

EXTRA = 0.35
"""Assumed time of a drafted token, as a share of a step without, before one was measured: other
tokens need other experts."""

ACCEPTANCE = 0.5
"""Assumed share of drafted tokens that are accepted, before one was measured."""


@dataclass
class DraftPace:
    """Chooses the number of drafted tokens, so that drafts never cost more than a small share.

    With acceptance a and n tokens, a step gives 1 + a + ... + a^n tokens in `plain + n extra`
    seconds. It takes the n with most tokens a second; the seconds that earlier drafts have lost,
    and what this one would if all its tokens were rejected, stay within `ALLOWED_LOSS` of the time.
    Where drafts gain nothing it soon verifies none.
    """

    plain_seconds: float | None = None
    """Mean time of a step without drafted tokens."""
    extra_seconds: float | None = None
    """Mean further time for each drafted token."""
    acceptance: float = ACCEPTANCE
    """Mean share of drafted tokens that are accepted."""
    total_seconds: float = 0.0
    """Time of all steps, those of prompts too."""
    lost_seconds: float = 0.0
    """Time of the steps with drafts beyond that of as many tokens without; negative: gained."""
    num_drafted: int = 0
    num_accepted: int = 0

    def choose(self, available: int) -> int:
        """Return the number of drafted tokens of the next step, at most `available`."""
        if self.plain_seconds is None:
            return 0
        plain = self.plain_seconds
        extra = EXTRA * plain if self.extra_seconds is None else self.extra_seconds
        left = ALLOWED_LOSS * self.total_seconds - self.lost_seconds
        best, best_rate, tokens = 0, 1.0 / plain, 1.0
        for n in range(1, min(available, LONGEST) + 1):
            if n * extra > left:
                break
            tokens += self.acceptance**n
            rate = tokens / (plain + n * extra)
            if rate > best_rate:
                best, best_rate = n, rate
        return best

    def record_prompt(self, seconds: float) -> None:
        """Record a prompt's step, which has no drafts."""
        self.total_seconds += seconds

    def record(self, seconds: float, *, drafted: int, accepted: int) -> None:
        """Record a step after the prompt's."""
        self.total_seconds += seconds
        if not drafted:
            self.plain_seconds = mix(self.plain_seconds, seconds)
            return
        assert self.plain_seconds is not None
        self.num_drafted += drafted
        self.num_accepted += accepted
        self.lost_seconds += seconds - (1 + accepted) * self.plain_seconds
        extra = max(0.0, seconds - self.plain_seconds) / drafted
        self.extra_seconds = mix(self.extra_seconds, extra)
        # Tokens behind the first that is rejected tell nothing.
        for is_accepted in [1.0] * accepted + [0.0] * (accepted < drafted):
            self.acceptance = mix(self.acceptance, is_accepted)


def mix(mean: float | None, value: float) -> float:
    return value if mean is None else MEMORY * mean + (1 - MEMORY) * value
