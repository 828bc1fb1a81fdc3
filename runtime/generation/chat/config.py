"""Settings of `moecast chat`."""

from dataclasses import dataclass
from pathlib import Path

from predictors.errors import MoecastError
from runtime.config import AUTO, ServedConfig


@dataclass(kw_only=True)
class ChatConfig(ServedConfig):
    """A chat in the terminal."""

    budget: str = AUTO
    """Memory for experts: auto (all, or what free memory allows), a size (4GiB), a share of all
    experts (50%) or a fraction (0.5)."""
    system_prompt: str | None = None
    """System prompt of the conversation."""
    max_new_tokens: int = 512
    """Most tokens of an answer."""
    temperature: float = 0.7
    """0: greedy; above: sampled, by `seed`."""
    top_p: float = 0.95
    """Sample from the most likely tokens that together have this probability."""
    draft: str | None = None
    """Verify drafted tokens, several in a step, where that pays: prompt-lookup (what followed
    the same text before), or a small model with the same tokenizer (its folder, or ORG/NAME on the
    Hub); none: never."""
    chat_template: Path | None = None
    """File with a chat template (Jinja) that replaces the tokenizer's; without either, turns are
    written as plain text."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise MoecastError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        if self.temperature < 0:
            raise MoecastError(f"temperature={self.temperature}: must be 0 (greedy) or above")
        if not 0 < self.top_p <= 1:
            raise MoecastError(f"top_p={self.top_p}: must be above 0 and at most 1")


SCHEMAS: dict[str, type] = {"chat": ChatConfig}
