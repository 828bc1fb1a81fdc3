"""The served model: loads it in the engine thread, and has what requests are checked against."""

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from runtime.config import BUILTIN
from runtime.engine.loading import KVReserve, load_served
from runtime.generation.chat_template import (
    EndOfTurn,
    end_of_turn,
    has_template,
    load_chat_tokenizer,
    special_ids,
)
from runtime.generation.constraint import GrammarVocabulary
from runtime.generation.drafting import drafting_options, load_draft_model
from runtime.generation.lockstep.group import LockstepGroup
from runtime.generation.prefix_cache import PrefixCache, find_prefix_obstacle
from runtime.hf.kv import CacheSize, KVCacheBudget, estimate_cache_bytes, measure_cache_size
from runtime.hf.tokens import context_length, eos_token_ids, max_token_bytes
from runtime.policy.budget import parse_size
from runtime.serving.answers.answer_formats import AnswerFormat, find_answer_format
from runtime.serving.answers.tool_template import ToolTemplate, find_tool_template
from runtime.serving.config import ANY_NAME, ServeConfig
from runtime.store.model_source import resolve

log = logging.getLogger(__name__)

RECOMMENDED_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Options whose default a model's generation_config.json may set."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    name: str
    """Name of the model in requests and responses."""
    aliases: frozenset[str]
    """Other names that requests may use; with `ANY_NAME`, every name."""
    tokenizer: PreTrainedTokenizerBase
    """Safe to share between threads: see `make_thread_safe`."""
    vocab_size: int
    """The model's; the tokenizer's may be smaller."""
    context_length: int | None
    """Most tokens of prompt and answer that the model was made for; None: unlimited."""
    logit_bytes: int
    """Bytes of the logits of one position."""
    eos_token_ids: frozenset[int]
    end_of_turn: EndOfTurn
    """Ends an answer in a chat, in addition to `eos_token_ids`."""
    special_tokens: dict[str, int] = field(default_factory=dict)
    """Ids of special tokens by their text."""
    default_sampling: dict[str, float] = field(default_factory=dict)
    """The model's recommended options, without those that it does not set."""
    has_template: bool = True
    max_token_bytes: int | None = None
    """Most bytes of text that one token can stand for; None: unknown."""
    kv_budget: KVCacheBudget | None = None
    """None: only `max_running` bounds the KV caches."""
    listed_names: tuple[str, ...] = ()
    """Names in the list of models, besides `name`."""
    tool_template: ToolTemplate = field(default_factory=ToolTemplate)
    answer_format: AnswerFormat | None = None
    """None: answers have neither reasoning nor tool calls."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""

    @property
    def max_length(self) -> int | None:
        """Most tokens of prompt and answer that this server accepts; None: unlimited."""
        kept = None if self.kv_budget is None else self.kv_budget.max_length
        bounds = (self.context_length, kept)
        return min((bound for bound in bounds if bound is not None), default=None)

    @cached_property
    def grammar_vocabulary(self) -> GrammarVocabulary:
        """Made for the first answer that a grammar constrains: it takes a second for 150,000.

        Raises:
            GrammarError: the tokenizer does not show what its tokens stand for.
        """
        return GrammarVocabulary(
            self.tokenizer,
            self.vocab_size,
            special_ids=self.special_tokens.values(),
            end_ids={*self.eos_token_ids, *self.end_of_turn.token_ids},
        )

    def is_named(self, name: str | None) -> bool:
        """Whether a request's `model` is this one; None means the model that is served."""
        return name in (None, self.name, *self.aliases) or ANY_NAME in self.aliases


def read_model_info(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: ServeConfig,
    kv_budget: KVCacheBudget | None,
) -> ModelInfo:
    """Read the properties of a loaded model."""
    name, *others = config.served_names
    names = {*config.accepted_names, config.model.name, config.model.id} - {BUILTIN}
    text_config = model.config.get_text_config()
    special_tokens = {str(tokenizer.convert_ids_to_tokens(i)): i for i in special_ids(tokenizer)}
    return ModelInfo(
        name=name,
        aliases=frozenset(names),
        listed_names=tuple(others),
        tokenizer=make_thread_safe(tokenizer),
        vocab_size=text_config.vocab_size,
        context_length=context_length(model.config),
        logit_bytes=text_config.vocab_size * model.dtype.itemsize,
        eos_token_ids=frozenset(eos_token_ids(model)),
        end_of_turn=end_of_turn(tokenizer),
        special_tokens=special_tokens,
        default_sampling={
            name: value
            for name in RECOMMENDED_OPTIONS
            if (value := getattr(model.generation_config, name, None)) is not None
        },
        has_template=has_template(tokenizer),
        max_token_bytes=max_token_bytes(tokenizer),
        tool_template=find_tool_template(tokenizer),
        answer_format=find_answer_format(tokenizer, special_tokens),
        kv_budget=kv_budget,
    )


def make_thread_safe(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Call the tokenizer once, so that several threads may use it afterwards; returns it.

    The first call resets padding and truncation that its file may set; changing these while
    another thread uses the tokenizer fails ("Already borrowed"). Later calls change nothing.
    """
    tokenizer("ready")
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """The engine thread's model, with the group that steps its sequences in lockstep."""

    model: PreTrainedModel
    group: LockstepGroup
    info: ModelInfo
    drafting: Mapping[str, Any] = field(default_factory=dict)
    """Options of `generate` by which drafted tokens are verified."""
    kept: PrefixCache | None = None
    """KV caches of ended answers, in the memory that running ones leave; None: each prompt is
    computed whole."""


def open_kept_texts(
    model: PreTrainedModel, reserve: KVReserve, budget: KVCacheBudget | None
) -> PrefixCache | None:
    """Keep texts within `kv_budget`, or in what `budget=auto` leaves to running answers.

    None for models whose KV caches cannot be gone on with; the log says why.
    """
    if (obstacle := find_prefix_obstacle(model)) is not None:
        log.info("prefix_cache: each prompt is computed whole: %s", obstacle)
        return None
    shares_memory = budget is None
    if budget is None:
        size = CacheSize(estimate_cache_bytes(model.config, 1, model.dtype), 0)
        budget = KVCacheBudget(size, reserve.count_bytes(model.config, model.dtype))
    return PrefixCache(model, budget=budget, shares_memory=shares_memory)


def load_model(config: ServeConfig) -> LoadedModel:
    """Load the model, its predictor and its tokenizer.

    Raises:
        MoecastError: the model, its predictor, its tokenizer or the chat template is missing or
            invalid, or the budget is too small.
    """
    kv_budget = None if config.kv_budget is None else parse_size(config.kv_budget, name="kv_budget")
    tokenizer = load_chat_tokenizer(resolve(config.model), config.chat_template)
    with ExitStack() as on_failure:
        reserve = KVReserve(num_sequences=config.max_running, num_bytes=kv_budget)
        draft_model = load_draft_model(config.draft, config.model)
        model = load_served(
            config, budget=config.budget, kv_reserve=reserve, draft_model=draft_model
        )
        on_failure.callback(model.close)
        budget = None if kv_budget is None else KVCacheBudget(measure_cache_size(model), kv_budget)
        info = read_model_info(model, tokenizer, config, budget)
        drafting = drafting_options(model, config.draft, draft_model=draft_model)
        kept = open_kept_texts(model, reserve, budget) if config.prefix_cache else None
        on_failure.pop_all()
    return LoadedModel(
        model=model, group=LockstepGroup(model), info=info, drafting=drafting, kept=kept
    )
