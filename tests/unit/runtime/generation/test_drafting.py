"""Decoding with drafts gives the tokens of greedy decoding, in fewer steps."""

from collections.abc import Sequence
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from predictors.errors import MoecastError
from runtime.config import PROMPT_LOOKUP, ModelConfig
from runtime.errors import PlanError
from runtime.generation import drafting
from runtime.generation.sampling import listen_to_tokens
from tests.builders import served
from tests.builders.families.build import save_family
from tests.builders.families.table import Family
from tests.builders.lockstep import run_together
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.tokenizers import byte_fallback_tokenizer

VOCAB_SIZE = 263
PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]


serving = partial(served.serving, budget="50%", dtype=torch.float32, system="on-demand")


@pytest.fixture(scope="module")
def model(folder):
    with serving(folder) as model:
        yield model


class EagerPace(drafting.DraftPace):
    """Drafts as many tokens in each step."""

    def __init__(self, count: int = 5) -> None:
        super().__init__(plain_seconds=1.0)
        self._count = count

    def choose(self, available: int) -> int:
        return min(available, self._count)


def count_calls(model: torch.nn.Module) -> list[int]:
    """Numbers of tokens of the forward passes from now on."""
    counts: list[int] = []

    def add(_module: object, args: tuple, kwargs: dict) -> None:
        counts.append((args[0] if args else kwargs["input_ids"]).shape[1])

    model.register_forward_pre_hook(add, with_kwargs=True)
    return counts


def repeat(input_ids, scores):
    """Makes the model repeat a few tokens."""
    scores = scores.clone()
    scores[0, {5: 6, 6: 7, 7: 8, 8: 9, 9: 5}.get(int(input_ids[0, -1]), 5)] += 1e3
    return scores


UP_TO_100 = GenerationConfig(max_length=100)
CYCLE = {"logits_processor": LogitsProcessorList([repeat])}


def hear(tokens: list[int], most: int = 0) -> StoppingCriteriaList:
    """Keeps the tokens in the list, and ends the text at so many of them."""

    def on_token(token: int) -> bool:
        tokens.append(token)
        return len(tokens) == most

    return StoppingCriteriaList([listen_to_tokens(on_token)])


def answer(model, pace=None, *, prompt=PROMPT, num_tokens=24, **options) -> list[int]:
    """The new tokens; with a pace, prompt lookup drafts."""
    inputs = torch.tensor([prompt], device=model.device)
    if pace is not None:
        options |= drafting.drafting_options(model, PROMPT_LOOKUP, pace)
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": num_tokens, **options}
    tokens = model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_drafts__full_windowed_and_latent_attention_take_tokens_back(tmp_path, name) -> None:
    with serving(save_family(tmp_path / "tiny", name), budget="60%") as model:
        expected, pace = answer(model), EagerPace()
        wrong = {"custom_generate": drafting.decode_with(lambda _: draft_the_same, pace)}
        assert answer(model, **wrong) == expected
        assert pace.num_drafted > pace.num_accepted, "nothing was taken back"
        assert answer(model) == expected, "the model is as it was"


def draft_the_same(tokens_1T: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([tokens_1T, torch.full((1, count), 3)], dim=1)


def test_drafts__repeated_text_takes_fewer_steps(model) -> None:
    steps, tokens = count_calls(model), list[int]()
    expected = answer(model, **CYCLE)
    assert len(steps) == 24
    assert answer(model, EagerPace(), stopping_criteria=hear(tokens), **CYCLE) == expected
    assert tokens == expected, "each token once, in order"
    assert len(steps) <= 24 + 6


def test_drafts__a_listener_that_ends_hears_no_more(model) -> None:
    tokens: list[int] = []
    answer(model, EagerPace(), stopping_criteria=hear(tokens, 4), **CYCLE)
    assert tokens == [8, 9, 5, 6]


def test_drafts__keep_to_the_number_of_tokens_and_the_end_of_the_text(model) -> None:
    for num_tokens in range(1, 10):
        assert len(answer(model, EagerPace(), num_tokens=num_tokens, **CYCLE)) == num_tokens
    assert answer(model, EagerPace(), eos_token_id=9, **CYCLE) == [8, 9]


def test_drafts__failed_generation_leaves_the_model_as_it_was(model) -> None:
    listening = StoppingCriteriaList([listen_to_tokens(Mock(side_effect=RuntimeError("no token")))])
    with pytest.raises(RuntimeError, match="no token"):
        answer(model, EagerPace(), stopping_criteria=listening)
    assert "_get_candidate_generator" not in vars(model)
    pace = EagerPace()
    assert answer(model) == answer(model, pace)
    assert pace.num_drafted > 0


NO_DRAFTS = [
    ("switch_transformers", "has an encoder; leave draft= out"),
    ("qwen3_next", "has a state that no token can be taken back from"),
    ("hy_v4", "its KV cache consists of .*Index"),
    ("minimax", "it generates with a KV cache of its own"),
]


@pytest.mark.parametrize(("name", "reason"), NO_DRAFTS)
def test_drafts__are_refused_where_tokens_cannot_be_taken_back(tmp_path, name, reason) -> None:
    folder = save_family(tmp_path / "tiny", name)
    with serving(folder, budget="100%") as model, pytest.raises(PlanError, match=reason):
        drafting.drafting_options(model, PROMPT_LOOKUP)


def test_drafts__steps_of_several_sequences_have_none_and_are_not_measured(model) -> None:
    """Their time is that of all sequences."""
    expected = answer(model, **CYCLE)
    for num_together in (2, 1):
        pace = EagerPace()
        found = run_together(model, [partial(answer, model, pace, **CYCLE)] * num_together)
        assert found == [expected] * num_together
        assert (pace.num_drafted > 0) == (pace.total_seconds > 0) == (num_together == 1)


def test_lookup__drafts_what_followed_the_same_text() -> None:
    draft = drafting.look_up(UP_TO_100)
    assert draft(torch.tensor([PROMPT]), 4).tolist() == [[*PROMPT, 8, 9, 5, 6]]
    single = torch.tensor([[5, 6, 7, 8, 6]])
    assert draft(single, 4) is single, "one token that is the same tells nothing"


def test_paced__measures_steps_behind_the_prompt_alone() -> None:
    pace, text = drafting.DraftPace(), torch.tensor([PROMPT])
    drafts = drafting.PacedDrafts(drafting.look_up(GenerationConfig()), pace, max_length=100)
    with_draft, scores = drafts.get_candidates(text)
    assert (with_draft.tolist(), scores) == ([PROMPT], None)
    drafts.update_candidate_strategy(text, torch.empty(0), 0)
    assert pace.plain_seconds is None
    prompt_seconds = pace.total_seconds
    assert prompt_seconds > 0
    drafts.get_candidates(text)
    drafts.update_candidate_strategy(text, torch.empty(0), 0)
    assert pace.plain_seconds == pytest.approx(pace.total_seconds - prompt_seconds)


# ---- a small model drafts


def served_folder(path):
    folder = tiny_qwen2_moe(path / "served", vocab_size=VOCAB_SIZE)
    byte_fallback_tokenizer().save_pretrained(folder)
    return folder


def drafting_model(path, *, sureness: float):
    model = plain_eager(served_folder(path))
    model.lm_head.weight.data *= sureness
    return model


def dense_folder(path, *, more_tokens: Sequence[str] = ()):
    """A small Llama with spare tokens."""
    folder = save_family(path / "draft", Family("llama", changes={"vocab_size": 300}))
    tokenizer = byte_fallback_tokenizer()
    tokenizer.add_tokens([*more_tokens])
    tokenizer.save_pretrained(folder)
    return folder


def test_draft_model__tokens_are_those_of_greedy_decoding(tmp_path) -> None:
    folder, draft = served_folder(tmp_path), str(dense_folder(tmp_path))
    draft_model, pace = drafting.load_draft_model(draft, ModelConfig(id=str(folder))), EagerPace(3)
    with serving(folder) as model:
        expected = answer(model)
        options = drafting.drafting_options(model, draft, pace, draft_model=draft_model)
        assert answer(model, **options) == expected
    assert pace.num_drafted > pace.num_accepted, "nothing was taken back"


def test_draft_model__one_that_is_always_right_saves_steps(tmp_path) -> None:
    """The served model itself drafts, and is sure of its tokens."""
    draft_model, pace = drafting_model(tmp_path, sureness=100), EagerPace(3)
    with serving(tmp_path / "served") as model:
        expected = answer(model)
        steps, drafts = count_calls(model), count_calls(draft_model)
        options = drafting.drafting_options(model, "served", pace, draft_model=draft_model)
        assert answer(model, **options) == expected
    assert pace.num_accepted == pace.num_drafted > 0
    # The prompt's step drafts nothing; the others verify three tokens, and the last what is left.
    assert steps == [len(PROMPT), 4, 4, 4, 4, 4, 3]
    assert drafts[0] == len(PROMPT) + 1
    assert max(drafts[1:]) <= 3, "the text is not read again"


def test_draft_model__takes_back_what_was_rejected(tmp_path) -> None:
    model = drafting_model(tmp_path, sureness=100)
    drafts, others = (drafting.draft_with(model, VOCAB_SIZE, UP_TO_100) for _ in range(2))
    (first,) = drafts(torch.tensor([PROMPT]), 3).tolist()
    assert len(first) == len(PROMPT) + 3
    rejected = torch.tensor([[*PROMPT, (first[len(PROMPT)] + 1) % VOCAB_SIZE]])
    assert torch.equal(drafts(rejected, 3), others(rejected, 3))


def test_draft_model__ends_where_it_is_unsure(tmp_path) -> None:
    drafts = drafting.draft_with(drafting_model(tmp_path, sureness=0), VOCAB_SIZE, UP_TO_100)
    assert drafts(torch.tensor([PROMPT]), 5).shape[1] == len(PROMPT) + 1


def test_draft_model__of_another_tokenizer_is_refused(tmp_path) -> None:
    draft = str(dense_folder(tmp_path, more_tokens=["another"]))
    with pytest.raises(MoecastError, match="its tokenizer is not that of"):
        drafting.load_draft_model(draft, ModelConfig(id=str(served_folder(tmp_path))))


def test_draft_model__misspelt_lookup_names_it() -> None:
    with pytest.raises(MoecastError, match="Did you mean 'prompt-lookup'.* or a small model"):
        drafting.load_draft_model("promt", ModelConfig())
