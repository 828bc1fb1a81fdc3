"""What was said so far, and what of it still fits the model."""

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from runtime.errors import ChatError
from runtime.generation.chat_template import Message, render

SHARE_FOR_ANSWER = 4
"""Old turns leave when less than this part of the context (a quarter) is left for the answer."""


@dataclass(frozen=True)
class ChatPrompt:
    tokens: list[int]
    num_dropped: int
    """Messages that left the conversation for this one to fit."""
    room: int | None
    """Tokens that the answer may have; None: the model has no longest sequence."""


@dataclass
class Conversation:
    """Messages in turn: the user's, the assistant's, and so on."""

    tokenizer: PreTrainedTokenizerBase
    context: int | None
    """Tokens of prompt and answer together, at most; None: no limit."""
    max_new_tokens: int
    system_prompt: str | None = None
    messages: list[Message] = field(default_factory=list)

    def say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def take_back(self) -> None:
        """The last message was never said."""
        self.messages.pop()

    def reset(self) -> None:
        """Forgets all but the system prompt."""
        self.messages.clear()

    def prompt(self) -> ChatPrompt:
        """Up to where the next answer begins.

        The oldest exchanges are dropped for good if the context has no room for them and the
        answer, the system prompt stays.

        Raises:
            ChatError: the last message alone does not fit, or the template refuses the messages;
                nothing is dropped then.
        """
        kept = list(self.messages)
        tokens = self._rendered(kept)
        if self.context is None:
            return ChatPrompt(tokens, 0, None)
        least = min(self.max_new_tokens, max(1, self.context // SHARE_FOR_ANSWER))
        while len(tokens) + least > self.context and (start := _next_turn(kept)) is not None:
            del kept[:start]
            tokens = self._rendered(kept)
        room = self.context - len(tokens)
        if room < 1:
            raise ChatError(
                f"this message takes {len(tokens)} tokens with the system prompt, and the model's "
                f"context is {self.context}; write a shorter one"
            )
        num_dropped = len(self.messages) - len(kept)
        self.messages = kept
        return ChatPrompt(tokens, num_dropped, room)

    def _rendered(self, messages: list[Message]) -> list[int]:
        system: list[Message] = []
        if self.system_prompt:
            system = [{"role": "system", "content": self.system_prompt}]
        return render([*system, *messages], self.tokenizer)


def _next_turn(messages: list[Message]) -> int | None:
    """Where the second of the user's messages is; None if there is one only."""
    places = [place for place, one in enumerate(messages) if one["role"] == "user"]
    return places[1] if len(places) > 1 else None
