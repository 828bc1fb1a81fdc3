"""A small model drafts: the served model's tokens stay its own, in fewer steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import runtime
from predictors.errors import MoecastError
from runtime.config import PROMPT_LOOKUP, ModelConfig
from runtime.generation.drafting.decoding import drafting_options
from runtime.generation.drafting.draft_model import (
    LEAST_PROBABILITY,
    DraftModelTokens,
    load_draft_model,
)
from runtime.generation.drafting.pace import DraftPace
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.tokenizers import byte_fallback_tokenizer

VOCAB_SIZE = 263
PROMPT = [5, 6, 7, 8, 9, 60, 61]


class FixedPace(DraftPace):
    """Drafts three tokens in each step, and remembers how many there were."""

    def __init__(self) -> None:
        super().__init__(plain_seconds=1.0)

    def choose(self, matched: int, available: int) -> int:
        assert matched == 0, "acceptance is that of the model as a whole"
        return min(available, 3)


def served_folder(path: Path) -> Path:
    folder = tiny_qwen2_moe(path / "served", vocab_size=VOCAB_SIZE)
    byte_fallback_tokenizer().save_pretrained(folder)
    return folder


def dense_folder(path: Path, *, vocab_size: int = VOCAB_SIZE, strips: bool = True) -> Path:
    """A small Llama with spare tokens; `strips=False`: with another tokenizer."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path / "draft")
    tokenizer = byte_fallback_tokenizer()
    if not strips:
        tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(path / "draft")
    return path / "draft"


@contextmanager
def serving(folder: Path) -> Iterator[PreTrainedModel]:
    model = runtime.load(folder, budget="50%", dtype=torch.float32, system="on-demand")
    with model.moecast:
        yield model


def answer(model: PreTrainedModel, num_tokens: int = 20, **options) -> list[int]:
    inputs = torch.tensor([PROMPT])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=num_tokens,
        pad_token_id=0,
        do_sample=False,
        **options,
    )
    return output[0].tolist()[len(PROMPT) :]


def count_calls(model: torch.nn.Module) -> list[int]:
    """Numbers of tokens of the forward passes from now on."""
    counts: list[int] = []

    def add(_module: object, args: tuple, kwargs: dict) -> None:
        counts.append((args[0] if args else kwargs["input_ids"]).shape[1])

    model.register_forward_pre_hook(add, with_kwargs=True)
    return counts


def test_draft_model__tokens_are_those_of_greedy_decoding(tmp_path: Path) -> None:
    folder, draft = served_folder(tmp_path), str(dense_folder(tmp_path, vocab_size=300))
    draft_model = load_draft_model(draft, ModelConfig(id=str(folder)))
    with serving(folder) as model:
        expected = answer(model)
        pace = FixedPace()
        assert answer(model, **drafting_options(model, draft, pace, draft_model=draft_model)) == (
            expected
        )
    assert pace.num_drafted > pace.num_accepted, "nothing was taken back"


def test_draft_model__one_that_is_always_right_saves_steps(tmp_path: Path) -> None:
    """The served model itself drafts, and is sure of its tokens."""
    folder = served_folder(tmp_path)
    draft_model = plain_eager(folder)
    draft_model.lm_head.weight.data *= 100
    with serving(folder) as model:
        expected = answer(model)
        steps, drafting = count_calls(model), count_calls(draft_model)
        pace = FixedPace()
        options = drafting_options(model, "served", pace, draft_model=draft_model)
        assert answer(model, **options) == expected
    assert pace.num_accepted == pace.num_drafted > 0
    # The prompt's step drafts nothing; the others verify three tokens, and the last what is left.
    assert steps == [len(PROMPT), 4, 4, 4, 4, 3]
    assert drafting[:4] == [len(PROMPT) + 1, 1, 1, 2], "each token is read once"


def test_draft_model__takes_back_what_was_rejected(tmp_path: Path) -> None:
    model = plain_eager(served_folder(tmp_path))
    drafts = DraftModelTokens(model, vocab_size=VOCAB_SIZE)

    def fresh(text: list[int]) -> list[int]:
        alone = DraftModelTokens(model, vocab_size=VOCAB_SIZE)
        return alone.draft(torch.tensor([text]), lambda _: 3)[0]

    first = drafts.draft(torch.tensor([PROMPT]), lambda _: 3)[0]
    rejected = [*PROMPT, (first[0] + 1) % VOCAB_SIZE]
    assert drafts.draft(torch.tensor([rejected]), lambda _: 3)[0] == fresh(rejected)
    # Nothing is drafted for a while, and then the text has become another.
    assert drafts.draft(torch.tensor([[*rejected, 3]]), lambda _: 0) == ([], 0)
    other = [*PROMPT[:3], 40, 41]
    assert drafts.draft(torch.tensor([other]), lambda _: 3)[0] == fresh(other)


def test_draft_model__ends_where_it_is_unsure(tmp_path: Path) -> None:
    model = plain_eager(served_folder(tmp_path))
    model.lm_head.weight.data *= 0
    drafts = DraftModelTokens(model, vocab_size=VOCAB_SIZE)
    assert 1 / VOCAB_SIZE < LEAST_PROBABILITY
    assert len(drafts.draft(torch.tensor([PROMPT]), lambda _: 5)[0]) == 1


def test_draft_model__of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    served = ModelConfig(id=str(served_folder(tmp_path)))
    draft = str(dense_folder(tmp_path, strips=False))
    with pytest.raises(MoecastError, match="its tokenizer is not that of"):
        load_draft_model(draft, served)


def test_draft_model__misspelt_lookup_names_it() -> None:
    with pytest.raises(MoecastError, match="Did you mean 'prompt-lookup'.* or a small model"):
        load_draft_model("promt", ModelConfig())


def test_draft_model__none_is_loaded_for_other_drafts() -> None:
    assert load_draft_model(None, ModelConfig()) is None
    assert load_draft_model(PROMPT_LOOKUP, ModelConfig()) is None
