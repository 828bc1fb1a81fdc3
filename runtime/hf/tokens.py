"""Tokenizers, token ids and lengths that a model's configuration states, and padded batches.

Shape suffixes: B rows of the batch, T columns.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from runtime.errors import CheckpointError
from runtime.hf.loading import read_config
from runtime.store.gguf.architectures import read_splits
from runtime.store.gguf.header import is_gguf
from runtime.store.model_check import CONFIG, check_tokenizer, describe_content


def load_gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer that a file's metadata describe, which splits text as llama.cpp does.

    Transformers builds it, and would split text for kinds that it does not know as GPT-2 does.

    Raises:
        CheckpointError: how its vocabulary splits text is not known here.
    """
    # Imported here because they take megabytes, which other models do not need.
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    architecture, described, options = get_gguf_tokenizer(str(file))
    kind = described.get("pre_tokenizer_type", "default")
    splits = read_splits().get(kind)
    if isinstance(splits, str):
        kind, splits = splits, None
    described["pre_tokenizer_type"] = kind
    is_bytes = described.get("tokenizer_type") == "gpt2"
    if is_bytes and splits is None and kind not in GGUF_PRE_TOKENIZER_SPLITS:
        raise CheckpointError(
            f"{file} says tokenizer.ggml.pre = {kind!r}, and how that splits text is not known "
            "here; give the original checkpoint, whose tokenizer.json says it"
        )
    # The tokenizers library panics where one is not in the vocabulary.
    vocabulary = set(described.get("tokens", ()))
    for merge in described.get("merges", ()):
        if not {merge.replace(" ", "", 1), *merge.split(" ", 1)} <= vocabulary:
            raise ValueError(f"the merge {merge!r} is not of its tokens")
    backend, _ = convert_gguf_tokenizer(architecture, described)
    if is_bytes and splits is not None:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(one), behavior="isolated") for one in splits),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Sequence", "Split"})
"""Parts that cut a text and drop nothing of it, except `Split` where it is configured to."""
NFC_SHRINKAGE = 3
"""NFC leaves at least this part of a text's bytes (the Kelvin sign, three bytes, becomes K)."""
EXTENDING_ROPE = ("linear", "dynamic", "yarn")
"""Kinds whose `factor` multiplies the context; others (llama3, longrope) state it as extended."""
SPACE_MARK = "\u2581"
"""Stands for a space in sentencepiece's vocabularies."""
BYTE_NAMES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's folder; code that it brings is never run.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    check_tokenizer(folder)
    try:
        tokenizer = (
            load_gguf_tokenizer(folder)
            if is_gguf(folder)
            else AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        )
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise ValueError("it has no vocabulary")
        return tokenizer
    except CheckpointError:
        raise
    # Transformers and tokenizers raise exceptions of every type for damaged files, also bare ones.
    except Exception as error:
        reason = f"{folder}: its tokenizer cannot be read ({' '.join(str(error).split())})"
        if is_gguf(folder):
            raise CheckpointError(f"{reason}; fetch the file again") from error
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{folder}: its tokenizer needs code that the checkpoint brings, which is never "
                "run (trust_remote_code is off). Use a version in Transformers' own format"
            ) from error
        if (folder / CONFIG).is_file():
            # It is read first; a fault there is not the tokenizer's.
            read_config(folder)
        raise CheckpointError(
            f"{reason}; {describe_content(folder)}. Fetch the tokenizer files again"
        ) from error


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the ids that end a text, in the order of the model's generation settings."""
    settings: Any = model.generation_config
    token_ids = None if settings is None else settings.eos_token_id
    if token_ids is None:
        return ()
    given = (token_ids,) if isinstance(token_ids, int) else token_ids
    return tuple(token for token in given if is_token(model, token))


def pad_token_id(model: PreTrainedModel) -> int:
    """Return the id to fill masked positions with: the model's own, else its EOS id, else 0.

    Some trainings write -1 for none.
    """
    given = (model.generation_config, model.config.get_text_config())
    pads: list[Any] = [getattr(settings, "pad_token_id", None) for settings in given]
    known = [pad for pad in pads if is_token(model, pad)]
    return known[0] if known else min(eos_token_ids(model), default=0)


def is_token(model: PreTrainedModel, token: Any) -> bool:
    return token in range(model.config.get_text_config().vocab_size)


def context_length(config: PreTrainedConfig) -> int | None:
    """Return the most tokens of prompt and answer together; None where the model sets no limit.

    Scaled rotary embeddings multiply the context of the first training by their factor; whether
    `max_position_embeddings` is before or after that differs between checkpoints.

    Raises:
        CheckpointError: a factor is no number.
    """
    text = config.get_text_config()
    length: int | None = getattr(text, "max_position_embeddings", None)
    if length is None:
        return None
    original = getattr(text, "original_max_position_embeddings", None) or length
    for rope in rope_parameters(text):
        factor = rope.get("factor") or 1
        if not isinstance(factor, (int, float)) or not math.isfinite(factor):
            raise CheckpointError(
                f"{CONFIG}: factor of {rope['rope_type']} (rope_scaling) is {factor!r:.100}, no "
                "number; fetch the model again"
            )
        if rope["rope_type"] in EXTENDING_ROPE:
            before = rope.get("original_max_position_embeddings") or original
            length = max(length, int(before * factor))
    return length


def rope_parameters(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield those of rotary embeddings; layers of different types may have different ones.

    Transformers has turned `rope_scaling` and its `type` into these.
    """
    waiting = [getattr(config, "rope_parameters", None)]
    while waiting:
        parameters = waiting.pop()
        if isinstance(parameters, Mapping):
            waiting += parameters.values()
            if isinstance(parameters.get("rope_type"), str):
                yield parameters


def pad_batch(
    rows: Sequence[Sequence[int]], pad_token_id: int, *, left: bool = True
) -> tuple[Tensor, Tensor]:
    """Return `(tokens, mask)`, `(B, T)` of int64; the mask is 0 on padding.

    A decoder continues from the last column, so its padding is on the left. An encoder's is on the
    right.
    """
    width = max(map(len, rows))
    tokens_BT = torch.full((len(rows), width), pad_token_id)
    mask_BT = torch.zeros((len(rows), width), dtype=torch.int64)
    for index, row in enumerate(rows):
        columns = slice(width - len(row), width) if left else slice(0, len(row))
        tokens_BT[index, columns] = torch.tensor(row, dtype=torch.int64)
        mask_BT[index, columns] = 1
    return tokens_BT, mask_BT


def max_token_bytes(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the most bytes of UTF-8 that one token can stand for; None where that is unknown.

    It is known for BPE with a token for each byte, if nothing before it drops or joins characters.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "model", None)).__name__ != "BPE" or backend.truncation:
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()):
        return None  # such a token takes any number of spaces
    cuts = list_parts(backend.pre_tokenizer)
    kinds = {part["type"] for part in cuts}
    drops_text = any(part.get("behavior") == "Removed" for part in cuts)
    normalizers = list_parts(backend.normalizer)
    if drops_text or not kinds <= KEEPING_PRE_TOKENIZERS or not all(map(keeps_text, normalizers)):
        return None
    vocabulary = tokenizer.get_vocab()
    if "ByteLevel" in kinds:
        has_all_bytes = vocabulary.keys() >= set(ByteLevel.alphabet())
    else:
        has_all_bytes = backend.model.byte_fallback and vocabulary.keys() >= BYTE_NAMES
    if not has_all_bytes:
        return None
    shrinkage = NFC_SHRINKAGE if any(part["type"] == "NFC" for part in normalizers) else 1
    return shrinkage * max(len(token.encode()) for token in vocabulary)


def keeps_text(normalizer: dict[str, Any]) -> bool:
    """Whether it shortens no text, or by `NFC_SHRINKAGE` at most."""
    if normalizer["type"] == "Replace":
        return (normalizer["pattern"], normalizer["content"]) == ({"String": " "}, SPACE_MARK)
    return normalizer["type"] in ("NFC", "Prepend", "Sequence")


def list_parts(component: Any) -> list[dict[str, Any]]:
    """Return the settings of a pre-tokenizer or normalizer, and of the parts of a sequence."""

    def walk(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield settings
        for part in settings.get("pretokenizers") or settings.get("normalizers") or ():
            yield from walk(part)

    return [] if component is None else list(walk(json.loads(component.__getstate__())))
