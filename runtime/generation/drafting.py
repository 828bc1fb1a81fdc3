"""Drafted tokens: several tokens that may come next, which one forward pass verifies.

Transformers drafts (a prompt's own text, or a small model) and verifies. Ours is the number of
tokens of each step, which follows from what steps have cost.

A step verifies several tokens: its products have other shapes, so last bits may differ from those
of steps of one token. The tokens are those that the model chooses.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)

from predictors.errors import MoecastError, unknown
from predictors.files import expand_home
from runtime.config import PROMPT_LOOKUP, ModelConfig
from runtime.errors import PlanError
from runtime.generation.lockstep.sequence import current_sequence
from runtime.generation.prefix_cache import find_prefix_obstacle
from runtime.hf.loading import load_plain
from runtime.hf.tokens import load_tokenizer
from runtime.store.hub_snapshot import HUB_ID
from runtime.store.model_check import check_files, list_weight_files
from runtime.store.model_source import find_folder, resolve

LONGEST = 8
"""Most drafted tokens in a step."""

MEMORY = 0.9
"""Weight of the past in means over steps."""

ALLOWED_LOSS = 0.02
"""Share of the time that drafts may have cost in total."""

EXTRA = 0.35
"""Assumed time of a drafted token, as a share of a step without, before one was measured: other
tokens need other experts."""

ACCEPTANCE = 0.5
"""Assumed share of drafted tokens that are accepted, before one was measured."""


@dataclass
class DraftPace:
    """Chooses the number of drafted tokens, so that drafts never cost more than a small share.

    With acceptance a and n tokens, a step gives 1 + a + ... + a^n tokens in `plain + n extra`
    seconds. It takes the n with most tokens a second; the seconds that earlier drafts have lost,
    and what this one would if all its tokens were rejected, stay within `ALLOWED_LOSS` of the time.
    Where drafts gain nothing it soon verifies none.
    """

    plain_seconds: float | None = None
    """Mean time of a step without drafted tokens."""
    extra_seconds: float | None = None
    """Mean further time for each drafted token."""
    acceptance: float = ACCEPTANCE
    """Mean share of drafted tokens that are accepted."""
    total_seconds: float = 0.0
    """Time of all steps, those of prompts too."""
    lost_seconds: float = 0.0
    """Time of the steps with drafts beyond that of as many tokens without; negative: gained."""
    num_drafted: int = 0
    num_accepted: int = 0

    def choose(self, available: int) -> int:
        """Return the number of drafted tokens of the next step, at most `available`."""
        if self.plain_seconds is None:
            return 0
        plain = self.plain_seconds
        extra = EXTRA * plain if self.extra_seconds is None else self.extra_seconds
        left = ALLOWED_LOSS * self.total_seconds - self.lost_seconds
        best, best_rate, tokens = 0, 1.0 / plain, 1.0
        for n in range(1, min(available, LONGEST) + 1):
            if n * extra > left:
                break
            tokens += self.acceptance**n
            rate = tokens / (plain + n * extra)
            if rate > best_rate:
                best, best_rate = n, rate
        return best

    def record_prompt(self, seconds: float) -> None:
        """Record a prompt's step, which has no drafts."""
        self.total_seconds += seconds

    def record(self, seconds: float, *, drafted: int, accepted: int) -> None:
        """Record a step after the prompt's."""
        self.total_seconds += seconds
        if not drafted:
            self.plain_seconds = mix(self.plain_seconds, seconds)
            return
        assert self.plain_seconds is not None
        self.num_drafted += drafted
        self.num_accepted += accepted
        self.lost_seconds += seconds - (1 + accepted) * self.plain_seconds
        extra = max(0.0, seconds - self.plain_seconds) / drafted
        self.extra_seconds = mix(self.extra_seconds, extra)
        # Tokens behind the first that is rejected tell nothing.
        for is_accepted in [1.0] * accepted + [0.0] * (accepted < drafted):
            self.acceptance = mix(self.acceptance, is_accepted)


def mix(mean: float | None, value: float) -> float:
    return value if mean is None else MEMORY * mean + (1 - MEMORY) * value


SHORTEST_MATCH, LONGEST_MATCH = 2, 4
"""Tokens of the text that must be the same. What follows a single one is hardly ever accepted."""

Draft = Callable[[Tensor, int], Tensor]
"""Returns a text `[1, T]` with at most so many drafted tokens behind it."""


def look_up(generation_config: GenerationConfig) -> Draft:
    """Draft what followed the same text before, in the prompt or the answer."""
    lookup = PromptLookupCandidateGenerator(
        max_matching_ngram_size=LONGEST_MATCH, max_length=generation_config.max_length
    )

    def draft(tokens_1T: Tensor, count: int) -> Tensor:
        pairs_T2 = tokens_1T[0].unfold(0, SHORTEST_MATCH, 1)
        if not (pairs_T2[:-1] == pairs_T2[-1]).all(dim=1).any():
            return tokens_1T
        lookup.num_output_tokens = count
        return lookup.get_candidates(tokens_1T)[0]

    return draft


class Drafter(AssistedCandidateGenerator):
    """Transformers' own, without the warning that its number of tokens is no part of a config."""

    def _prepare_generation_args(
        self, input_ids: Tensor, min_new_tokens: int, max_new_tokens: int
    ) -> dict[str, Any]:
        arguments = super()._prepare_generation_args(input_ids, min_new_tokens, max_new_tokens)
        self.generation_config.max_new_tokens = arguments.pop("max_new_tokens")
        del arguments["min_new_tokens"]
        return arguments


def draft_with(
    model: PreTrainedModel, vocab_size: int, generation_config: GenerationConfig
) -> Draft:
    """Draft greedily with a small model, up to a token that it is not sure of.

    Args:
        vocab_size: number of the served model's tokens; the draft model may have spare ones.
    """
    spare = list(range(vocab_size, model.config.get_text_config().vocab_size))
    drafter = Drafter(
        torch.zeros(1, 1, dtype=torch.long),
        model,
        GenerationConfig(
            max_length=generation_config.max_length,
            min_length=0,
            do_sample=False,
            eos_token_id=generation_config.eos_token_id,
            pad_token_id=0,
        ),
        model_kwargs={},
        logits_processor=LogitsProcessorList(
            [SuppressTokensLogitsProcessor(spare, device=str(model.device))] if spare else []
        ),
    )

    def draft(tokens_1T: Tensor, count: int) -> Tensor:
        drafter.num_assistant_tokens = count
        drafter.assistant_kwargs["attention_mask"] = torch.ones_like(tokens_1T)
        return drafter.get_candidates(tokens_1T)[0]

    return draft


class PacedDrafts(CandidateGenerator):
    """Drafts as many tokens as the pace says, and measures each step for it.

    Not in a group's steps of several sequences, whose time says nothing of this one's drafts.
    """

    def __init__(self, draft: Draft, pace: DraftPace, *, max_length: int):
        self._draft = draft
        self._pace = pace
        self._max_length = max_length
        self._is_prompt = True
        self._is_alone = True
        self._num_drafted = 0
        self._start = 0.0

    def get_candidates(self, input_ids: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return the text `[1, T]` with the drafted tokens behind it, and no scores of theirs."""
        self._start = time.perf_counter()
        room = self._max_length - input_ids.shape[1] - 1
        self._is_alone = is_alone()
        count = self._pace.choose(room) if self._is_alone and not self._is_prompt else 0
        candidates = self._draft(input_ids, count) if count else input_ids
        self._num_drafted = candidates.shape[1] - input_ids.shape[1]
        return candidates, None

    def update_candidate_strategy(
        self,
        input_ids: Tensor,  # noqa: ARG002
        scores: Tensor,  # noqa: ARG002
        num_matches: int,
    ) -> None:
        """Learn from the step: how long it took, and how many tokens were accepted."""
        seconds = time.perf_counter() - self._start
        is_prompt, self._is_prompt = self._is_prompt, False
        if not (self._is_alone and is_alone()):
            return
        if is_prompt:
            self._pace.record_prompt(seconds)
        else:
            accepted = min(int(num_matches), self._num_drafted)
            self._pace.record(seconds, drafted=self._num_drafted, accepted=accepted)


def is_alone() -> bool:
    """Return whether the latest step computed no other sequence together with this one."""
    sequence = current_sequence()
    return sequence is None or sequence.is_alone


def drafting_options(
    model: PreTrainedModel,
    draft: str | None,
    pace: DraftPace | None = None,
    *,
    draft_model: PreTrainedModel | None = None,
) -> dict[str, Any]:
    """Return what `model.generate` needs to verify drafts; nothing without drafts.

    Args:
        draft: the option `draft=`.
        pace: what earlier answers have shown; None: begins without knowledge.
        draft_model: the one that `load_draft_model` returns for `draft`.

    Raises:
        PlanError: a model cannot take tokens back, or computes several after others otherwise.
    """
    if draft is None:
        return {}
    refuse_drafts(model)
    make_draft: Callable[[GenerationConfig], Draft] = look_up
    if draft_model is not None:
        refuse_drafts(draft_model)
        vocab_size = model.config.get_text_config().vocab_size
        make_draft = partial(draft_with, draft_model.to(model.device), vocab_size)
    return {"custom_generate": decode_with(make_draft, pace or DraftPace())}


def refuse_drafts(model: PreTrainedModel) -> None:
    """Raise PlanError if the model cannot verify drafted tokens."""
    reason = find_prefix_obstacle(model)
    if getattr(model, "_is_stateful", False):
        reason = "it has a state that no token can be taken back from"
    if reason is not None:
        raise PlanError(f"draft: not for {model.config.model_type}: {reason}; leave draft= out")


def decode_with(
    make_draft: Callable[[GenerationConfig], Draft], pace: DraftPace
) -> Callable[..., Any]:
    """Return a `custom_generate` of Transformers that decodes one text with drafts.

    `generate` itself takes `prompt_lookup_num_tokens` or `assistant_model`, but not a number of
    tokens that changes with each step.
    """

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        generation_config: GenerationConfig,
        **options: Any,
    ) -> Any:
        cache = options.get("past_key_values")
        drafts = PacedDrafts(
            make_draft(generation_config), pace, max_length=generation_config.max_length
        )

        def take_drafts(**_: Any) -> PacedDrafts:
            # Asked for once, before the first forward pass: other sequences have not run since.
            del model._get_candidate_generator
            if cache is not None and cache.get_seq_length():
                skip_cached_once(model, cache)
            return drafts

        model._get_candidate_generator = take_drafts
        return model._assisted_decoding(input_ids, generation_config=generation_config, **options)

    return decode


def skip_cached_once(model: PreTrainedModel, cache: Cache) -> None:
    """Leave the tokens that a cache holds out of the next forward pass.

    `generate` does so for a cache that it is given, but not with drafts.
    """
    prepare = model.prepare_inputs_for_generation

    def prepare_others(input_ids: Tensor, *, next_sequence_length: Any, **options: Any) -> Any:
        del model.prepare_inputs_for_generation
        next_sequence_length = input_ids.shape[1] - cache.get_seq_length()
        return prepare(input_ids, next_sequence_length=next_sequence_length, **options)

    model.prepare_inputs_for_generation = prepare_others


def load_draft_model(draft: str | None, served: ModelConfig) -> PreTrainedModel | None:
    """Load the model that `draft=` names; None if it names none.

    Load it before the served model, whose automatic budget is what memory is left.

    Raises:
        PlanError: the model is not there or cannot be loaded, or has another tokenizer.
    """
    if draft is None or draft == PROMPT_LOOKUP:
        return None
    if not (HUB_ID.fullmatch(draft) or expand_home(draft).exists()):
        raise PlanError(
            f"{unknown('draft', draft, [PROMPT_LOOKUP])}, or a small model with the same "
            "tokenizer: its folder, or ORG/NAME on the Hub"
        )
    try:
        folder = find_folder(ModelConfig(name=draft, id=draft, local_only=served.local_only))
        check_files(folder)
        list_weight_files(folder)
        vocabulary = load_tokenizer(folder).get_vocab()
        if vocabulary != load_tokenizer(resolve(served)).get_vocab():
            raise PlanError(f"its tokenizer is not that of {served.name}, whose tokens it drafts")
        return load_plain(folder, dtype="auto", decode_kernels=served.decode_kernels)
    except MoecastError as error:
        raise PlanError(
            f"draft={draft}: {error}. Give a small model of the same family, as a folder or a "
            f"repository of the Hub, or draft={PROMPT_LOOKUP}"
        ) from error
