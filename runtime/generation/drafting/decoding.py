"""Decoding with drafts by Transformers' assisted generation, with our drafts and pace.

A step verifies several tokens: its products have other shapes, so last bits may differ from those
of steps of one token. The tokens are those that the model chooses.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from runtime.errors import PlanError
from runtime.generation.drafting.draft_model import DraftModelTokens
from runtime.generation.drafting.pace import DraftPace
from runtime.generation.drafting.prompt_lookup import PromptLookup


class DraftSource(Protocol):
    """Drafts the tokens of one text."""

    def draft(self, tokens_1T: Tensor, choose: Callable[[int], int]) -> tuple[list[int], int]:
        """Return tokens that may come next, and what their acceptance depends on.

        Args:
            choose: returns how many tokens to draft, given what their acceptance depends on.
        """


class PacedDrafts(CandidateGenerator):
    """Transformers' view of a source of drafts; it measures each step."""

    def __init__(self, source: DraftSource, pace: DraftPace, *, max_length: int):
        self._source = source
        self._pace = pace
        self._max_length = max_length
        self._is_prompt = True
        self._matched = self._num_drafted = 0
        self._start = 0.0

    def get_candidates(self, input_ids: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return the text `[1, T]` with the drafted tokens behind it, and no scores of theirs."""
        self._start = time.perf_counter()
        draft: list[int] = []
        if not self._is_prompt:
            room = self._max_length - input_ids.shape[1] - 1
            draft, self._matched = self._source.draft(
                input_ids, lambda matched: self._pace.choose(matched, room)
            )
        self._num_drafted = len(draft)
        behind = torch.tensor([draft], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat([input_ids, behind], dim=1), None

    def update_candidate_strategy(
        self,
        input_ids: Tensor,  # noqa: ARG002
        scores: Tensor,  # noqa: ARG002
        num_matches: int,
    ) -> None:
        """Learn from the step: how long it took, and how many tokens were accepted."""
        seconds = time.perf_counter() - self._start
        if self._is_prompt:
            self._is_prompt = False
            self._pace.record_prompt(seconds)
            return
        self._pace.record(
            seconds,
            matched=self._matched,
            drafted=self._num_drafted,
            accepted=min(int(num_matches), self._num_drafted),
        )


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
        PlanError: the model cannot take tokens back.
    """
    if draft is None:
        return {}
    refuse_drafts(model)
    make_source: Callable[[], DraftSource] = PromptLookup
    if draft_model is not None:
        refuse_drafts(draft_model)
        vocab_size = model.config.get_text_config().vocab_size
        make_source = partial(DraftModelTokens, draft_model.to(model.device), vocab_size=vocab_size)
    return {"custom_generate": decode_with(make_source, pace or DraftPace())}


def refuse_drafts(model: PreTrainedModel) -> None:
    """Raise PlanError if the model cannot verify drafted tokens."""
    reason = None
    if model.config.is_encoder_decoder:
        reason = "has an encoder"
    elif getattr(model, "_is_stateful", False):
        reason = "has a state that no token can be taken back from"
    elif not model.can_generate():
        reason = "does not generate token by token"
    if reason is not None:
        raise PlanError(f"draft: {model.config.model_type} {reason}; leave draft= out")


def decode_with(make_source: Callable[[], DraftSource], pace: DraftPace) -> Callable[..., Any]:
    """Return a `custom_generate` of Transformers that decodes one text with drafts."""

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        generation_config: GenerationConfig,
        **options: Any,
    ) -> Any:
        drafts = PacedDrafts(make_source(), pace, max_length=generation_config.max_length)

        def take_drafts(**_: Any) -> PacedDrafts:
            # Asked for once, before the first forward pass: other sequences have not run since.
            del model._get_candidate_generator
            return drafts

        model._get_candidate_generator = take_drafts
        return model._assisted_decoding(input_ids, generation_config=generation_config, **options)

    return decode
