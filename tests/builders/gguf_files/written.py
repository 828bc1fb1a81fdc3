"""Writes GGUF files of every architecture: headers of llama.cpp's converter, random tensors.

What llama.cpp computes with the same files is recorded (`make record`).
"""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.builders.gguf_files.parts import write_files

HERE = Path(__file__).parent
ARCHITECTURES: dict[str, dict[str, Any]] = json.loads((HERE / "architectures.json").read_text())
"""By name: `metadata` and `tensors` (shapes) of a file, and llama.cpp's `logits` after `PROMPT`, by
the experts' type."""
SPLITS: dict[str, Any] = json.loads((HERE / "splits.json").read_text())
"""A `text`, `merges` that cross the borders of its words, and llama.cpp's `tokens` of it by the
name of the vocabulary's kind."""
VOCAB_SIZE = 64
PROMPT = [(7 * i * i + 3 * i + 1) % VOCAB_SIZE for i in range(24)]
Tensors = dict[str, list[int]]


def bytes_to_unicode() -> dict[int, str]:
    """Return the characters that stand for bytes in the vocabularies of GPT-2's kind."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    replaced = {byte: chr(256 + place) for place, byte in enumerate(others)}
    return {byte: chr(byte) for byte in printed} | replaced


def write_gguf(
    name: str,
    file: Path,
    *,
    experts: str = "F32",
    embeddings: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    change: Callable[[Tensors], Any] = lambda _: None,
    added: Mapping[str, np.ndarray] | None = None,
    pre: str | None = None,
    ends: Mapping[str, int] | None = None,
    texts: Mapping[int, str] | None = None,
) -> Path:
    """Write a file.

    Args:
        experts: type of the experts' matrices.
        embeddings: type of the embeddings.
        metadata: values in place of the header's, without the architecture's name; None removes.
        change: changes the shapes of tensors by name.
        added: more tensors.
        pre: how the vocabulary splits text; it is that of `SPLITS` then, which the tensors are not.
        ends: ids of tokens by their names in the metadata (`eos`).
        texts: of tokens, in place of the vocabulary's.
    """
    header = ARCHITECTURES[name]
    architecture = header["architecture"]
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in {**header["metadata"], **(metadata or {})}.items():
        if value not in (None, "", []):
            kind = gguf.GGUFValueType.get_type(value)
            if kind == gguf.GGUFValueType.INT32:
                kind = gguf.GGUFValueType.UINT32
            writer.add_key_value(f"{architecture}.{key}", value, kind)
    merges = ["! !"] if pre is None else SPLITS["merges"]
    tokens = [*(chr(ord("!") + i) for i in range(VOCAB_SIZE - 1)), "!!"]
    if pre is not None:
        tokens = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in merges)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre or "qwen2")
    writer.add_token_list([(texts or {}).get(at, text) for at, text in enumerate(tokens)])
    for key, token in (ends or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(merges)
    tensors = dict(header["tensors"])
    change(tensors)
    for key, shape in tensors.items():
        data = make_weights(key, shape)
        kinds = {"token_embd.weight": embeddings}
        if key.endswith("_exps.weight"):
            kinds[key] = experts
        kind = gguf.GGMLQuantizationType[kinds.get(key, "F32")]
        if kind != gguf.GGMLQuantizationType.F32:
            data = gguf.quants.quantize(data, kind)
        writer.add_tensor(key, data, raw_dtype=kind)
    for key, data in (added or {}).items():
        writer.add_tensor(key, data)
    write_files(writer)
    return file


def make_weights(name: str, shape: list[int]) -> np.ndarray:
    """Return random weights that let every tensor change the result."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    if "norm" in name or name.startswith("rope_freqs"):
        weights = random.uniform(0.5, 1.5, shape)
    elif name.endswith("ssm_a"):
        weights = -random.uniform(0.5, 1.5, shape)
    elif len(shape) == 1 or name.endswith(".bias"):
        weights = random.uniform(-0.3, 0.3, shape)
    else:
        weights = random.standard_normal(shape) / shape[-1] ** 0.5
    return weights.astype(np.float32)
