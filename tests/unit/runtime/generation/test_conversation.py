"""A conversation keeps what fits, forgets the oldest first, and never forgets the system prompt."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import ChatError
from runtime.generation.chat_template import Conversation, render
from tests.builders.plain_answers import TOKENIZER


def conversation(*contents: str, context: int | None = 2048, **options) -> Conversation:
    """The user speaks first, then the assistant, and so on."""
    made = Conversation(TOKENIZER, context, **{"max_new_tokens": 16, **options})
    for number, content in enumerate(contents):
        made.append("assistant" if number % 2 else "user", content)
    return made


def length(*contents: str, system_prompt: str | None = None) -> int:
    """Of a prompt that ends with the last content, in tokens."""
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    for number, content in enumerate(contents):
        messages.append({"role": "assistant" if number % 2 else "user", "content": content})
    return len(render(messages, TOKENIZER))


def test_prompt__of_a_model_without_a_longest_sequence_is_never_cut() -> None:
    prompt = conversation(*["many words " * 50] * 31, context=None).prompt()
    assert (prompt.num_dropped, prompt.room) == (0, None)


def test_prompt__drops_the_oldest_exchange_and_no_more_than_it_must() -> None:
    said = ("first " * 20, "answer " * 20, "second", "answer", "third")
    kept = length(*said[2:], system_prompt="be brief")
    talk = conversation(*said, context=kept + 16, system_prompt="be brief")
    prompt = talk.prompt()
    assert (prompt.num_dropped, prompt.room) == (2, 16)
    assert len(prompt.tokens) == kept
    assert [one["content"] for one in talk.messages] == ["second", "answer", "third"]
    assert "be brief" in TOKENIZER.decode(prompt.tokens)
    assert talk.prompt().num_dropped == 0  # said once


def test_prompt__one_token_more_and_nothing_is_dropped() -> None:
    said = ("first", "answer", "second")
    for room, num_dropped in {4: 0, 3: 2}.items():
        talk = conversation(*said, context=length(*said) + room, max_new_tokens=4)
        assert talk.prompt().num_dropped == num_dropped


def test_prompt__a_long_answer_keeps_some_of_the_conversation() -> None:
    said = ("first", "answer", "second")
    talk = conversation(*said, context=2 * length(*said), max_new_tokens=100_000)
    assert talk.prompt().num_dropped == 0


def test_prompt__refuses_a_message_that_cannot_fit() -> None:
    talk = conversation("first", "answer", "words " * 200, context=60)
    with pytest.raises(ChatError, match=r"takes \d+ tokens .* context is 60"):
        talk.prompt()
    talk.remove_last()
    talk.append("user", "short")
    assert talk.prompt().num_dropped == 0
    assert len(talk.messages) == 3


def test_reset__forgets_all_but_the_system_prompt() -> None:
    talk = conversation("first", "answer", system_prompt="be brief")
    talk.reset()
    talk.append("user", "again")
    assert len(talk.prompt().tokens) == length("again", system_prompt="be brief")


@given(
    said=st.lists(st.text("ab ", max_size=30), max_size=6),
    last=st.text("ab ", max_size=20),
    context=st.integers(40, 200),
    system_prompt=st.none() | st.just("be brief"),
)
@settings(max_examples=60, deadline=None)
def test_prompt__fits_and_keeps_the_last_message(said, last, context, system_prompt) -> None:
    contents = [*said[: len(said) // 2 * 2], last]
    talk = conversation(*contents, context=context, system_prompt=system_prompt)
    prompt = talk.prompt()
    assert 1 <= prompt.room == context - len(prompt.tokens)
    left = [one["content"] for one in talk.messages]
    assert left == contents[prompt.num_dropped :]
    assert left[-1] == last
    assert talk.messages[0]["role"] == "user"
    assert prompt.tokens[: len(prompt.tokens)] == render(
        [
            *([{"role": "system", "content": system_prompt}] if system_prompt else []),
            *talk.messages,
        ],
        TOKENIZER,
    )
