"""Answers that a grammar constrains: which tokens may come next, and where the text may end.

llguidance follows the grammar over the bytes of the tokens. Shape suffixes: B rows (always 1), T
tokens so far, V vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from runtime.errors import GrammarError
from runtime.generation.detokenizer import BYTE_TOKEN, byte_level_alphabet
from runtime.generation.grammar_check import LIMITS, describe
from runtime.hf.tokens import SPACE_MARK


class GrammarVocabulary(llguidance.TokenizerWrapper):
    """A model's tokens as llguidance takes them.

    Args:
        special_ids: tokens that are no text.
        vocab_size: the model's; the last token, one beyond, ends the text of a model without any.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        *,
        special_ids: Collection[int],
        end_ids: Collection[int],
    ):
        # Without the base's own, which wants a tokenizer of another kind.
        self.vocab_size = vocab_size
        self.eos_token_id = vocab_size
        self.special_token_ids = sorted(special_ids)
        self.end_ids = frozenset(end_ids)
        self.tokens = [*token_bytes(tokenizer, vocab_size), b""]
        self._tokenizer = tokenizer
        ends = [*sorted(end_ids), vocab_size]
        self.native = llguidance.LLTokenizer(self, n_vocab=vocab_size + 1, eos_token=ends)

    def __call__(self, text: str) -> list[int]:
        """Encode a text that a grammar forces; never with llguidance's option `no_forcing`."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def token_bytes(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[bytes]:
    """The text of each token in UTF-8; tokens beyond the tokenizer's have none.

    Raises:
        GrammarError: the tokenizer does not show them.
    """
    decoder: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    kinds = "" if decoder is None else decoder.__getstate__().decode()
    if '"ByteLevel"' in kinds:
        alphabet = byte_level_alphabet()
    elif '"ByteFallback"' in kinds or '"Metaspace"' in kinds:
        alphabet = None
    else:
        raise GrammarError("this model's tokenizer does not show the bytes of its tokens")
    texts = [b""] * vocab_size
    added = tokenizer.added_tokens_decoder
    for spelling, token in tokenizer.get_vocab().items():
        if token >= vocab_size:
            continue
        if token in added:
            texts[token] = spelling.encode()
        elif alphabet is not None and alphabet.keys() >= set(spelling):
            texts[token] = bytes(alphabet[character] for character in spelling)
        elif byte := BYTE_TOKEN.fullmatch(spelling):
            texts[token] = bytes([int(byte[1], 16)])
        else:
            texts[token] = spelling.replace(SPACE_MARK, " ").encode()
    return texts


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar for any number of answers."""

    matcher: llguidance.LLMatcher
    vocabulary: GrammarVocabulary

    def begin(self) -> "Constraint":
        return Constraint(self.matcher.deep_copy(), self.vocabulary)


def compile_grammar(grammar: str, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    """Compile a grammar that `check_grammars` has found harmless.

    Raises:
        GrammarError: it cannot be compiled.
    """
    matcher = llguidance.LLMatcher(vocabulary.native, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(f"the grammar cannot be compiled: {matcher.get_error()}")
    return CompiledGrammar(matcher, vocabulary)


class Constraint:
    """One answer's place in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: GrammarVocabulary):
        self._matcher = matcher
        self.vocabulary = vocabulary
        self._followed: list[int] = []
        """Tokens that led to the matcher's place."""
        self._answer: list[int] = []

    def push(self, token: int) -> bool:
        """Add a token to the answer; True if nothing can follow it.

        Raises:
            GrammarError: the grammar refuses it, or has become too complex.
        """
        self._answer.append(token)
        if not self._follow(self._answer):
            raise GrammarError(f"the grammar refuses token {token}{self._problem()}")
        return self._matcher.is_stopped()

    def allowed(self, tokens: list[int]) -> Tensor | None:
        """Return the tokens `[V]` that may follow these.

        None if the grammar refuses them, or nothing may follow: drafted tokens, which are dropped.

        Raises:
            GrammarError: the grammar has become too complex.
        """
        if not self._follow(tokens) or self._matcher.is_stopped():
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if problem := self._problem():
            raise GrammarError(f"the grammar became too complex{problem}")
        allowed = np.unpackbits(bits, count=self.vocabulary.vocab_size, bitorder="little")
        return torch.from_numpy(allowed).bool()

    def _follow(self, tokens: list[int]) -> bool:
        """Go to the place after these tokens; False if the grammar refuses them."""
        kept = len(self._followed)
        while self._followed[:kept] != tokens[:kept]:
            kept -= 1
        if kept < len(self._followed):
            self._matcher.rollback(len(self._followed) - kept)
            del self._followed[kept:]
        rest = tokens[kept:]
        num_taken = self._matcher.try_consume_tokens(rest)
        self._followed += rest[:num_taken]
        return num_taken == len(rest)

    def _problem(self) -> str:
        return f": {describe(self._matcher.get_error())}" if self._matcher.is_error() else ""


class GrammarMask(LogitsProcessor):
    """Leaves the tokens that the grammar allows; the end of the text only where it is complete.

    Args:
        end_ids: tokens that end the text; a model's others are not allowed.
        num_prompt: tokens before the answer.
    """

    def __init__(self, constraint: Constraint, *, end_ids: Collection[int], num_prompt: int):
        self._constraint = constraint
        self._num_prompt = num_prompt
        unwanted = constraint.vocabulary.end_ids.difference(end_ids)
        self._unwanted = torch.tensor(sorted(unwanted), dtype=torch.long)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        allowed_V = self._constraint.allowed(input_ids[0, self._num_prompt :].tolist())
        if allowed_V is None:
            return scores
        allowed_V[self._unwanted] = False
        if not allowed_V.any():
            raise GrammarError("the grammar leaves no token that the answer may continue with")
        allowed_V = allowed_V.to(scores.device)
        masked = scores.masked_fill(~allowed_V, float("-inf"))
        # `min_tokens` forbids the end, which may be all that the grammar allows.
        return torch.where(allowed_V, 0.0, masked) if masked.max() == -torch.inf else masked
