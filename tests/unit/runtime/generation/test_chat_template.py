"""Messages become what the model was taught to read, and answers end where the template says."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from runtime.errors import ChatError
from runtime.generation.chat_template import PLAIN_STOP, EndOfTurn, end_of_turn, plain_text, render
from tests.builders.plain_answers import TOKENIZER

SAID = [("system", "be brief"), ("user", "hello"), ("assistant", "yes"), ("user", "why")]
TURNS = [{"role": role, "content": text} for role, text in SAID]


def words(*, template: str | None = None) -> PreTrainedTokenizerBase:
    names = ["<unk>", "<e>", "<end>", "user", "assistant", "hello", "yes", ":", "User", "Assistant"]
    backend = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    special = {"unk_token": "<unk>", "eos_token": "<e>", "extra_special_tokens": ["<end>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = template
    return tokenizer


def test_end_of_turn__is_the_templates_though_the_model_names_another() -> None:
    ends = TOKENIZER.convert_ids_to_tokens(list(end_of_turn(TOKENIZER).token_ids))
    assert (TOKENIZER.eos_token, ends) == ("<|endoftext|>", ["<|im_end|>"])


def test_plain_text__is_a_dialogue_that_ends_where_the_answer_begins() -> None:
    text = "System: be brief\n\nUser: hello\n\nAssistant: yes\n\nUser: why\n\nAssistant:"
    assert plain_text(TURNS) == text


def test_no_template__writes_plain_text_and_stops_at_the_next_user() -> None:
    tokenizer = words()
    tokens = render([{"role": "user", "content": " hello "}], tokenizer)
    assert tokenizer.convert_ids_to_tokens(tokens) == ["User", ":", "hello", "Assistant", ":"]
    assert end_of_turn(tokenizer) == EndOfTurn(strings=(PLAIN_STOP,))


ENDS = [("<end>", (2,)), ("<e>", (1,)), (" user", ()), ("", ())]


@pytest.mark.parametrize(("behind", "expected"), ENDS)
def test_end_of_turn__is_a_special_token_or_none(behind: str, expected: tuple[int, ...]) -> None:
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}" + behind + "{% endfor %}"
    assert end_of_turn(words(template=template)) == EndOfTurn(token_ids=expected)


def test_template_that_refuses__is_the_users_fault_and_says_why() -> None:
    tokenizer = words(template="{{ raise_exception('System role not supported') }}")
    with pytest.raises(ChatError, match="System role not supported"):
        render(TURNS, tokenizer)
    assert end_of_turn(tokenizer) == EndOfTurn()


def test_no_messages__are_refused() -> None:
    with pytest.raises(ChatError, match="no messages"):
        render([], TOKENIZER)
