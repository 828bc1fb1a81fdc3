"""Answers are what `generate` gives, pieces as they come, and Ctrl-C ends one of them only."""

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

import runtime
from runtime.config import BUILTIN_MODELS
from runtime.generation.chat.generator import ChatAnswer, ChatGenerator
from runtime.generation.chat_template import EndOfTurn, end_of_turn, render

TOKENIZER = AutoTokenizer.from_pretrained(BUILTIN_MODELS / "qwen2_moe_tiny")
PROMPT = render([{"role": "user", "content": "What does the heart do?"}], TOKENIZER)


@pytest.fixture(scope="module")
def model():
    model = runtime.load(budget="50%", predictor="qwen2-moe-tiny/stride")
    yield model
    model.close()


def answer(
    model: PreTrainedModel,
    *,
    max_new_tokens: int = 12,
    ending: EndOfTurn | None = None,
    on_text=None,
    temperature: float = 0.0,
) -> tuple[ChatAnswer, list[str]]:
    pieces: list[str] = []
    answering = ChatGenerator(
        model,
        TOKENIZER,
        end_of_turn=end_of_turn(TOKENIZER) if ending is None else ending,
        temperature=temperature,
        top_p=0.9,
        on_text=on_text or pieces.append,
    )
    return answering.answer(PROMPT, max_new_tokens=max_new_tokens), pieces


def generated(model: PreTrainedModel, max_new_tokens: int) -> list[int]:
    inputs = torch.tensor([PROMPT])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    return output[0, len(PROMPT) :].tolist()


def test_answer__is_the_text_that_generate_gives_in_pieces(model: PreTrainedModel) -> None:
    said, pieces = answer(model)
    assert said.text == TOKENIZER.decode(generated(model, 12))
    assert "".join(pieces) == said.text
    assert len(pieces) > 3
    assert (said.num_tokens, said.ended, said.interrupted) == (12, False, False)
    assert said.first_token_seconds is not None
    assert 0 < said.first_token_seconds < said.seconds
    assert said.tokens_per_second is not None


def test_answer__ends_at_the_end_of_turn_token_and_omits_it(model: PreTrainedModel) -> None:
    tokens = generated(model, 12)
    place = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    said, pieces = answer(model, ending=EndOfTurn(token_ids=(tokens[place],)))
    assert said.ended
    assert said.num_tokens == place + 1
    assert said.text == "".join(pieces) == TOKENIZER.decode(tokens[:place])


def test_answer__ends_before_a_stop_string(model: PreTrainedModel) -> None:
    text = TOKENIZER.decode(generated(model, 12))
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    said, pieces = answer(model, ending=EndOfTurn(strings=(stop,)))
    assert said.ended
    assert said.text == "".join(pieces) == text[: text.index(stop)]


@pytest.mark.parametrize("after", [1, 4])
def test_interrupt__keeps_what_was_said_and_the_model_answers_on(
    model: PreTrainedModel, after: int
) -> None:
    pieces: list[str] = []

    def on_text(text: str) -> None:
        pieces.append(text)
        if len(pieces) == after:
            raise KeyboardInterrupt

    said, _ = answer(model, on_text=on_text)
    assert said.interrupted
    assert not said.ended
    whole = TOKENIZER.decode(generated(model, 12))
    assert said.text == "".join(pieces)
    assert said.text
    assert whole.startswith(said.text)
    again, _ = answer(model)
    assert again.text == whole
    assert not again.interrupted


def test_sampling__is_drawn_by_the_seed(model: PreTrainedModel) -> None:
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(answer(model, temperature=1.0)[0].text)
    assert texts[0] == texts[1] != texts[2]
