"""The messages of a chat, cut to the model's context."""

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from runtime.errors import ChatError
from runtime.generation.chat_template import Message, render

SHARE_FOR_ANSWER = 4
"""Old messages are dropped when less than 1/4 of the context is left for the answer."""


@dataclass(frozen=True)
class ChatPrompt:
    """Token ids of the conversation and the limits for its answer."""

    tokens: list[int]
    num_dropped: int
    """Messages dropped to make this prompt fit."""
    room: int | None
    """Most tokens of the answer; None: the model names no limit."""


@dataclass
class Conversation:
    """Alternating messages of user and assistant."""

    tokenizer: PreTrainedTokenizerBase
    context: int | None
    """Most tokens of prompt and answer together; None: no limit."""
    max_new_tokens: int
    system_prompt: str | None = None
    messages: list[Message] = field(default_factory=list)

    def append(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def remove_last(self) -> None:
        self.messages.pop()

    def reset(self) -> None:
        """Remove all messages but the system prompt."""
        self.messages.clear()

    def prompt(self) -> ChatPrompt:
        """Render the conversation up to where the next answer begins.

        The oldest messages are dropped for good if they do not fit the context together with the
        answer; the system prompt stays.

        Raises:
            ChatError: the last message alone does not fit, or the template refuses the messages;
                nothing is dropped then.
        """
        kept = list(self.messages)
        tokens = self._render(kept)
        if self.context is None:
            return ChatPrompt(tokens, 0, None)
        least = min(self.max_new_tokens, max(1, self.context // SHARE_FOR_ANSWER))
        while len(tokens) + least > self.context and (start := _next_turn(kept)) is not None:
            del kept[:start]
            tokens = self._render(kept)
        room = self.context - len(tokens)
        if room < 1:
            raise ChatError(
                f"this message takes {len(tokens)} tokens with the system prompt, and the model's "
                f"context is {self.context}; write a shorter one"
            )
        num_dropped = len(self.messages) - len(kept)
        self.messages = kept
        return ChatPrompt(tokens, num_dropped, room)

    def _render(self, messages: list[Message]) -> list[int]:
        system: list[Message] = []
        if self.system_prompt:
            system = [{"role": "system", "content": self.system_prompt}]
        return render([*system, *messages], self.tokenizer)


def _next_turn(messages: list[Message]) -> int | None:
    """Index of the user's second message; None if there is only one."""
    indices = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return indices[1] if len(indices) > 1 else None
