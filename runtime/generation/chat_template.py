"""Render messages with the model's chat template and find what ends an answer.

A tokenizer's own chat template is used if it has one. Otherwise turns are written as plain text,
which a base model continues like any dialogue:

    System: be brief

    User: hello

    Assistant:

and the answer ends where the model begins the next `User:`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from runtime.errors import ChatError

Message = Mapping[str, str]
"""`role` (system, user, assistant, or what the template knows) and `content`."""

PLAIN_STOP = "\n\nUser:"
"""Stop string of an answer in plain text."""
MARK = "moecast-answer"
"""Placeholder answer that shows what the template writes after one."""


@dataclass(frozen=True)
class EndOfTurn:
    """Tokens and strings that end an answer, in addition to the model's end-of-text tokens."""

    token_ids: tuple[int, ...] = ()
    """Special tokens such as `<|im_end|>`, which a model's generation_config may not name."""
    strings: tuple[str, ...] = ()


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def render(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    check_text: Callable[[str], None] = lambda _: None,
) -> list[int]:
    """Render the token ids of the conversation up to where the assistant's answer begins.

    Args:
        check_text: called with the text before it is encoded; its exceptions are passed on.

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
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
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
