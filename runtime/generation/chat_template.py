"""Conversations: rendered with the model's chat template, cut to its context; what ends an answer.

A tokenizer's own chat template is used if it has one. Otherwise turns are written as plain text,
which a base model continues like any dialogue:

    System: be brief

    User: hello

    Assistant:

and the answer ends where the model begins the next `User:`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from predictors.files import read_text_file
from runtime.errors import ChatError, CheckpointError
from runtime.hf.tokens import load_tokenizer

Message = Mapping[str, Any]
"""`role` (system, user, assistant, or what the template knows) and `content`."""

PLAIN_STOP = "\n\nUser:"
"""Stop string of an answer in plain text."""
MARK = "moecast-answer"
"""Placeholder answer that shows what the template writes after one."""
SHARE_FOR_ANSWER = 4
"""Old messages are dropped when less than 1/4 of the context is left for the answer."""


@dataclass(frozen=True)
class EndOfTurn:
    """Tokens and strings that end an answer, in addition to the model's end-of-text tokens."""

    token_ids: tuple[int, ...] = ()
    """Special tokens such as `<|im_end|>`, which a model's generation_config may not name."""
    strings: tuple[str, ...] = ()


def load_chat_tokenizer(folder: Path, chat_template: Path | None) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, with another chat template if one is given.

    Raises:
        CheckpointError: one of them cannot be read, or the file is not a chat template.
    """
    tokenizer = load_tokenizer(folder)
    if chat_template is not None:
        try:
            tokenizer.chat_template = read_text_file(chat_template)
            # Every template accepts a user's message.
            render([{"role": "user", "content": "?"}], tokenizer)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"chat_template={chat_template} is not usable ({error}); name a file with a chat "
                "template (Jinja)"
            ) from error
    return tokenizer


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def render(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    check_text: Callable[[str], None] = lambda _: None,
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """Render the token ids of the conversation up to where the assistant's answer begins.

    Args:
        check_text: called with the text before it is encoded; its exceptions are passed on.
        tools: that the model may call, in OpenAI's shape.
        options: more variables of the template.

    Raises:
        ChatError: there is no message, or the model's template refuses them (roles out of order,
            an unsupported system prompt).
    """
    if not messages:
        raise ChatError("no messages: a conversation needs at least one")
    if not has_template(tokenizer):
        text = plain_text(messages)
        check_text(text)
        return list(tokenizer(text)["input_ids"])
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) or None,
            add_generation_prompt=True,
            tokenize=False,
            **options,
        )
    # A template's own code raises exceptions of every type for messages that it does not expect.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ChatError(
            f"the model's chat template refuses these messages: {reason}; its roles are most often "
            "one optional system message, then alternating user and assistant messages"
        ) from error
    assert isinstance(text, str)
    check_text(text)
    # The template writes the special tokens at the beginning itself.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def plain_text(messages: Sequence[Message]) -> str:
    turns = [f"{one['role'].capitalize()}: {one['content'].strip()}\n\n" for one in messages]
    return "".join(turns) + "Assistant:"


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> EndOfTurn:
    """Find what the template writes after an answer, so that generation can stop there.

    For a template that refuses to render an answer, only the model's end-of-text tokens end it.
    """
    if not has_template(tokenizer):
        return EndOfTurn(strings=(PLAIN_STOP,))
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    # As above, of every type.
    except Exception:
        return EndOfTurn()
    _, _, tail = str(text).rpartition(MARK)
    tokens = tokenizer(tail, add_special_tokens=False)["input_ids"]
    if tokens and tokens[0] in special_ids(tokenizer):
        return EndOfTurn(token_ids=(tokens[0],))
    return EndOfTurn()


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of special tokens, which represent no text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}


# ---- a conversation


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
