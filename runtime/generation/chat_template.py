"""Messages as the token ids that a model was taught to read, and where its answer ends.

A tokenizer that brings a chat template is used as it is. For one that brings none, turns are
written as plain text, which a base model continues as it would any dialogue:

    System: be brief

    User: hello

    Assistant:

and the answer ends where the model begins to write the next `User:`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from runtime.errors import ChatError

Message = Mapping[str, str]
"""`role` (system, user, assistant, or what the template knows) and `content`."""

PLAIN_STOP = "\n\nUser:"
"""Where an answer ends that is written as plain text."""
MARK = "moecast-answer"
"""Stands for an answer while the template is asked what it writes behind one."""


@dataclass(frozen=True)
class EndOfTurn:
    """What ends an answer, beside the model's own end-of-text tokens."""

    token_ids: tuple[int, ...] = ()
    """Special tokens, such as `<|im_end|>`: a model's generation_config may not name them."""
    strings: tuple[str, ...] = ()


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer brings a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def render(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of the conversation, up to where the assistant's answer begins.

    Raises:
        ChatError: there is no message, or the model's template refuses these (roles out of turn,
            a system prompt where it has no place).
    """
    if not messages:
        raise ChatError("no messages: a conversation needs at least one")
    if not has_template(tokenizer):
        return list(tokenizer(plain_text(messages))["input_ids"])
    try:
        encoded = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, return_dict=True
        )
    except TemplateError as error:
        raise ChatError(
            f"the model's chat template refuses these messages: {error}; its roles are most often "
            "one optional system message, then user and assistant in turn"
        ) from error
    return list(encoded["input_ids"])


def plain_text(messages: Sequence[Message]) -> str:
    """The conversation without a template."""
    turns = [f"{one['role'].capitalize()}: {one['content'].strip()}\n\n" for one in messages]
    return "".join(turns) + "Assistant:"


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> EndOfTurn:
    """What the template writes behind an answer, so that generating can stop there.

    A template that refuses to show an answer has no end of turn of its own: the model's
    end-of-text tokens end it then.
    """
    if not has_template(tokenizer):
        return EndOfTurn(strings=(PLAIN_STOP,))
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except TemplateError:
        return EndOfTurn()
    _, _, tail = str(text).rpartition(MARK)
    tokens = tokenizer(tail, add_special_tokens=False)["input_ids"]
    if tokens and tokens[0] in special_ids(tokenizer):
        return EndOfTurn(token_ids=(tokens[0],))
    return EndOfTurn()


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids that stand for no text of their own."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
