"""A conversation keeps what fits, forgets the oldest first, and never forgets the system prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ChatError
from runtime.generation.chat_template import SHARE_FOR_ANSWER, Conversation, render
from tests.builders.plain_answers import TOKENIZER


def alternate(contents: list[str]) -> list[dict[str, str]]:
    """The user speaks first, then the assistant, and so on."""
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": one} for role, one in zip(roles, contents, strict=False)]


def conversation(*contents: str, context: int | None = 2048, **options) -> Conversation:
    options = {"max_new_tokens": 16, **options}
    return Conversation(TOKENIZER, context, messages=alternate(contents), **options)


def rendered(*contents: str, system_prompt: str | None = None) -> list[int]:
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return render([*system, *alternate(contents)], TOKENIZER)


def test_prompt__of_a_model_without_a_longest_sequence_is_never_cut() -> None:
    prompt = conversation(*["many words " * 50] * 31, context=None).prompt()
    assert (prompt.num_dropped, prompt.room) == (0, None)


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
    assert talk.prompt().tokens == rendered("again", system_prompt="be brief")


@given(
    said=st.lists(st.text("ab ", max_size=30), max_size=6), last=st.text("ab ", max_size=20),
    context=st.integers(40, 200), most=st.sampled_from([1, 4, 16, 100_000]),
    system_prompt=st.none() | st.just("be brief"),
)  # fmt: skip
def test_prompt__drops_the_oldest_exchanges_that_it_must(said, last, context, most, system_prompt):
    """An answer is left its most tokens, or a share of the context where they are more."""
    contents = [*said[: len(said) // 2 * 2], last]
    system = {"system_prompt": system_prompt}
    talk = conversation(*contents, context=context, max_new_tokens=most, **system)
    room = context - min(most, context // SHARE_FOR_ANSWER)
    prompts = {n: rendered(*contents[n:], **system) for n in range(0, len(contents), 2)}
    dropped = next((n for n, one in prompts.items() if len(one) <= room), len(contents) - 1)
    prompt = talk.prompt()
    assert (prompt.num_dropped, prompt.tokens) == (dropped, prompts[dropped])
    assert 1 <= prompt.room == context - len(prompt.tokens)
    assert [one["content"] for one in talk.messages] == contents[dropped:]
    assert talk.prompt().num_dropped == 0  # said once
