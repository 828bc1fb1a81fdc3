"""Answers are what `generate` gives, in pieces as they come, and Ctrl-C ends one of them only."""

from types import SimpleNamespace

import pytest
import torch

from runtime.generation.answer import Answer, FinishReason, TokenDelta
from runtime.generation.chat_template import render
from tests.builders.plain_answers import TOKENIZER
from tests.builders.served import serving
from tests.builders.serving import speaking_model

PROMPT = render([{"role": "user", "content": "What does the heart do?"}], TOKENIZER)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = speaking_model(tmp_path_factory.mktemp("speaking"))
    with serving(folder, budget="50%", predictor="skip") as model:
        yield model


def answer(model, *, deliver=None) -> tuple[Answer, list[str], FinishReason]:
    pieces: list[str] = []
    made = Answer(deliver or (lambda one: pieces.append(one.text)))
    made.generate(model, TOKENIZER, PROMPT, max_new_tokens=12, do_sample=False)
    return made, pieces, made.end()


def generate(model) -> str:
    inputs = torch.tensor([PROMPT])
    options = {"attention_mask": torch.ones_like(inputs), "do_sample": False}
    return TOKENIZER.decode(model.generate(inputs, max_new_tokens=12, **options)[0, len(PROMPT) :])


def test_answer__is_the_text_that_generate_gives_in_pieces(model) -> None:
    made, pieces, reason = answer(model)
    assert "".join(pieces) == generate(model)
    assert len(pieces) > 3
    assert (made.num_tokens, reason) == (12, FinishReason.LENGTH)
    assert 0 < made.first_token_seconds < made.seconds
    assert made.tpot_seconds == pytest.approx((made.seconds - made.first_token_seconds) / 11)


def test_answer__a_characters_bytes_are_held_back() -> None:
    """The model here generates without reporting its tokens, as diffusion models do."""
    tokens = TOKENIZER("a🙂b")["input_ids"]
    assert len(tokens) > 3, "the character is several tokens"

    def generate(inputs: torch.Tensor, **_: object) -> torch.Tensor:
        return torch.cat([inputs, torch.tensor([tokens])], dim=1)

    config = SimpleNamespace(is_encoder_decoder=False)
    model = SimpleNamespace(device=torch.device("cpu"), config=config, generate=generate)
    made, pieces, _ = answer(model)
    assert [piece for piece in pieces if piece] == ["a", "🙂", "b"]
    assert made.num_tokens == len(tokens)


@pytest.mark.parametrize("after", [1, 4])
def test_interrupt__keeps_what_was_said_and_the_model_answers_on(model, after: int) -> None:
    pieces: list[str] = []

    def deliver(delta: TokenDelta) -> None:
        pieces.append(delta.text)
        if len(pieces) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(model, deliver=deliver)
    whole = generate(model)
    assert whole.startswith("".join(pieces))
    assert "".join(answer(model)[1]) == whole
