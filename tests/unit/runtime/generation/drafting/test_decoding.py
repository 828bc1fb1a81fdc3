"""Decoding with drafts gives the tokens of greedy decoding, in fewer steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

import runtime
from runtime.config import PROMPT_LOOKUP
from runtime.errors import PlanError
from runtime.generation.drafting.decoding import PacedDrafts, drafting_options
from runtime.generation.drafting.pace import DraftPace
from runtime.generation.drafting.prompt_lookup import PromptLookup, repeat
from runtime.generation.sampling import TokenListener
from tests.builders.families.build import save_family
from tests.builders.families.table import FAMILIES
from tests.builders.models import tiny_qwen2_moe

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]


@contextmanager
def serving(folder: Path, *, budget: str = "50%") -> Iterator[PreTrainedModel]:
    model = runtime.load(folder, budget=budget, dtype=torch.float32, system="on-demand")
    with model.moecast:
        yield model


class EagerPace(DraftPace):
    """Drafts as many tokens as there are."""

    def __init__(self) -> None:
        super().__init__(plain_seconds=1.0)

    def choose(self, matched: int, available: int) -> int:
        return min(available, 5)


class CountingForward:
    """Number of forward passes of a model."""

    def __init__(self, model: torch.nn.Module):
        self.count = 0
        model.register_forward_hook(self._add)

    def _add(self, *_: object) -> None:
        self.count += 1


class Cycle(LogitsProcessor):
    """Makes the model repeat a few tokens."""

    def __call__(self, input_ids, scores):
        following = {5: 6, 6: 7, 7: 8, 8: 9, 9: 5}
        scores = scores.clone()
        scores[0, following.get(int(input_ids[0, -1]), 5)] += 1e3
        return scores


def answer(
    model: PreTrainedModel, pace: DraftPace | None, *, num_tokens: int = 24, **options
) -> list[int]:
    inputs = torch.tensor([PROMPT])
    drafting = {} if pace is None else drafting_options(model, PROMPT_LOOKUP, pace)
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=num_tokens,
        pad_token_id=0,
        **options,
        **drafting,
    )
    return output[0].tolist()[len(PROMPT) :]


@pytest.mark.parametrize("budget", ["30%", "100%"])
def test_drafts__tokens_are_those_of_greedy_decoding(tmp_path: Path, budget: str) -> None:
    with serving(tiny_qwen2_moe(tmp_path / "tiny"), budget=budget) as model:
        expected = answer(model, None, do_sample=False)
        pace = EagerPace()
        assert answer(model, pace, do_sample=False) == expected
        assert pace.num_drafted > 0
        assert answer(model, None, do_sample=False) == expected, "the model is as it was"


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_drafts__sliding_windows_and_latent_attention_take_tokens_back(
    tmp_path: Path, name: str
) -> None:
    with serving(save_family(tmp_path / "tiny", FAMILIES[name]), budget="100%") as model:
        expected = answer(model, None, do_sample=False)
        pace = EagerPace()
        assert answer(model, pace, do_sample=False) == expected
        assert pace.num_drafted > pace.num_accepted, "nothing was taken back"


def test_drafts__repeated_text_takes_fewer_steps(tmp_path: Path) -> None:
    with serving(tiny_qwen2_moe(tmp_path / "tiny")) as model:
        options = {"do_sample": False, "logits_processor": LogitsProcessorList([Cycle()])}
        counting = CountingForward(model)
        expected = answer(model, None, **options)
        plain, counting.count = counting.count, 0
        tokens: list[int] = []

        def on_token(token: int) -> bool:
            tokens.append(token)
            return False

        listening = StoppingCriteriaList([TokenListener(on_token)])
        assert answer(model, EagerPace(), stopping_criteria=listening, **options) == expected
        assert tokens == expected, "each token once, in order"
        assert plain == 24
        assert counting.count <= 6


def test_drafts__a_listener_that_ends_hears_no_more(tmp_path: Path) -> None:
    with serving(tiny_qwen2_moe(tmp_path / "tiny")) as model:
        tokens: list[int] = []

        def on_token(token: int) -> bool:
            tokens.append(token)
            return len(tokens) == 4

        answer(
            model,
            EagerPace(),
            do_sample=False,
            logits_processor=LogitsProcessorList([Cycle()]),
            stopping_criteria=StoppingCriteriaList([TokenListener(on_token)]),
        )
        assert tokens == [8, 9, 5, 6]


def test_drafts__keep_to_the_number_of_tokens_and_the_end_of_the_text(tmp_path: Path) -> None:
    with serving(tiny_qwen2_moe(tmp_path / "tiny")) as model:
        options = {"do_sample": False, "logits_processor": LogitsProcessorList([Cycle()])}
        for num_tokens in range(1, 10):
            got = answer(model, EagerPace(), num_tokens=num_tokens, **options)
            assert len(got) == num_tokens
        ended = answer(model, EagerPace(), eos_token_id=9, **options)
        assert ended == [8, 9]


def test_drafts__failed_generation_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    with serving(tiny_qwen2_moe(tmp_path / "tiny")) as model:

        def fail(token: int) -> bool:
            raise RuntimeError(f"no {token}")

        listening = StoppingCriteriaList([TokenListener(fail)])
        with pytest.raises(RuntimeError, match="no "):
            answer(model, EagerPace(), do_sample=False, stopping_criteria=listening)
        assert "_get_candidate_generator" not in vars(model)
        assert answer(model, None, do_sample=False) == answer(model, EagerPace(), do_sample=False)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("switch_transformers", "has an encoder; leave draft= out"),
        ("qwen3_next", "has a state that no token can be taken back from"),
    ],
)
def test_drafts__are_refused_where_tokens_cannot_be_taken_back(
    tmp_path: Path, name: str, reason: str
) -> None:
    with (
        serving(save_family(tmp_path / "tiny", FAMILIES[name]), budget="100%") as model,
        pytest.raises(PlanError, match=reason),
    ):
        drafting_options(model, PROMPT_LOOKUP)


def test_lookup__measures_steps_behind_the_prompt_alone() -> None:
    pace = DraftPace()
    lookup = PacedDrafts(PromptLookup(), pace, max_length=100)
    text = torch.tensor([PROMPT])
    with_draft, scores = lookup.get_candidates(text)
    assert with_draft.tolist() == [PROMPT]
    assert scores is None
    lookup.update_candidate_strategy(text, torch.empty(0), 0)
    assert pace.plain_seconds is None
    prompt_seconds = pace.total_seconds
    assert prompt_seconds > 0
    lookup.get_candidates(text)
    lookup.update_candidate_strategy(text, torch.empty(0), 0)
    assert pace.plain_seconds == pytest.approx(pace.total_seconds - prompt_seconds)


def test_repeat__goes_on_in_the_text_that_it_makes() -> None:
    tokens = torch.tensor([1, 2, 3, 1, 2]).numpy()
    assert repeat(tokens, 2, 5) == [3, 1, 2, 3, 1]
