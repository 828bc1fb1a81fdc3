"""Drafts of a small model that has the served model's tokenizer."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from predictors.errors import MoecastError, unknown
from predictors.files import expand_home
from runtime.config import PROMPT_LOOKUP, ModelConfig
from runtime.errors import PlanError
from runtime.hf.loading import load_plain
from runtime.hf.tokens import load_tokenizer
from runtime.store.hub_snapshot import HUB_ID
from runtime.store.model_check import check_weight_files
from runtime.store.model_source import find_folder, resolve

LEAST_PROBABILITY = 0.4
"""Drafting ends at a token that the draft model gives a smaller probability: it is rejected more
often than not, and the tokens behind it with it."""


class DraftModelTokens:
    """Drafts one text's tokens greedily, with a separate KV cache.

    Args:
        vocab_size: number of the served model's tokens; the draft model may have spare ones.
    """

    def __init__(self, model: PreTrainedModel, *, vocab_size: int):
        self._model = model
        self._vocab_size = vocab_size
        self._cache = DynamicCache(config=model.config.get_text_config())
        self._seen: list[int] = []
        """Tokens whose keys and values are in the cache."""

    @torch.inference_mode()
    def draft(self, tokens_1T: Tensor, choose: Callable[[int], int]) -> tuple[list[int], int]:
        """Return the drafted tokens, and a constant: acceptance is known for all drafts alike."""
        count = choose(0)
        if count == 0:
            return [], 0
        text = tokens_1T[0].tolist()
        self._keep_common(text)
        drafted: list[int] = []
        while len(drafted) < count:
            logits_V = self._read((text + drafted)[len(self._seen) :])
            probability, token = logits_V.softmax(-1).max(-1)
            if drafted and probability < LEAST_PROBABILITY:
                break
            drafted.append(int(token))
        return drafted, 0

    def _keep_common(self, text: list[int]) -> None:
        """Remove from the cache what is no beginning of the text; its last token is read anew."""
        pairs = zip(self._seen, text[:-1], strict=False)
        kept = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        kept = min(len(self._seen), len(text) - 1) if kept is None else kept
        if kept < len(self._seen):
            self._cache.crop(kept - len(self._seen))
            del self._seen[kept:]

    def _read(self, tokens: list[int]) -> Tensor:
        inputs = torch.tensor([tokens], device=self._model.device)
        output = self._model(
            input_ids=inputs, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        self._seen += tokens
        logits: Tensor = output.logits[0, -1, : self._vocab_size]
        return logits.float()


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
        check_weight_files(folder)
        vocabulary = load_tokenizer(folder).get_vocab()
        if vocabulary != load_tokenizer(resolve(served)).get_vocab():
            raise PlanError(f"its tokenizer is not that of {served.name}, whose tokens it drafts")
        return load_plain(folder, dtype="auto", decode_kernels=served.decode_kernels)
    except MoecastError as error:
        raise PlanError(
            f"draft={draft}: {error}. Give a small model of the same family, as a folder or a "
            f"repository of the Hub, or draft={PROMPT_LOOKUP}"
        ) from error
