"""Reads the header of a GGUF file, and checks that it holds a model that can be served.

Nothing in it is trusted: counts are bounded by the bytes that follow, and every tensor must lie
inside the file. Neither PyTorch nor Transformers is imported, so that a file is refused at once.
"""

import hashlib
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from predictors.files import require_plain_file
from runtime.config import GGUF
from runtime.errors import CheckpointError
from runtime.store.gguf.architectures import read_architectures

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Version 1 counted in 32 bits; no file of it is left."""
MAX_HEADER_BYTES = 48 << 20
"""Those of models with 256,000 tokens take 16 MiB."""
MAX_ENTRIES = 1 << 16
"""Values, and tensors: models with a tensor for each expert have 50,000."""
MAX_LAYERS = 256
"""Arrays with a number for each layer are kept."""
CHUNK_BYTES = 1 << 20
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
NUMBERS = {
    number: struct.Struct(f"<{format_}")
    for number, format_ in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
"""Forms of numbers by the number of a value's type."""
UINT32, UINT64 = NUMBERS[4], NUMBERS[10]
SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
TOKENS = "tokenizer.ggml.tokens"
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
"""The end of the name of a part, as llama-gguf-split writes it."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    """As in PyTorch: the last dimension is that of a row."""
    kind: str
    """Name of its type, such as `Q4_K`."""
    offset: int
    """First byte in the file."""
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file."""

    file: Path
    """The only one, or the first of the model's parts."""
    metadata: Mapping[str, Any]
    """By key; an array is its length, short ones of numbers are tuples."""
    tensors: Mapping[str, GgufTensor]
    digest: str
    """sha256 of the header's bytes; of several parts, of their digests."""
    files: tuple[Path, ...]
    """All parts, in order."""

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])


def is_gguf(model: Path) -> bool:
    """Return whether a model is a GGUF file and no folder."""
    return model.suffix == GGUF and not model.is_dir()


def read_header(file: Path) -> GgufHeader:
    """Read and check the header of a file, and of the parts that follow the first of several.

    Raises:
        CheckpointError: it is no GGUF file, damaged or truncated; or a part is missing or of
            another model.
    """
    first = _read_part(file)
    if not isinstance(first.metadata.get("general.architecture"), str):
        if first.metadata.get(SPLIT_NUMBER):
            raise CheckpointError(f"{file} is a later part of a model; give its first part")
        raise CheckpointError(
            f"{file} is a damaged GGUF file (it names no general.architecture); fetch it again"
        )
    count = first.metadata.get(SPLIT_COUNT, 1)
    if not isinstance(count, int):
        raise CheckpointError(
            f"{file} is a damaged GGUF file ({SPLIT_COUNT} is {count!r}); fetch it again"
        )
    return first if count in (0, 1) else _join_parts(first, count)


def _read_part(file: Path) -> GgufHeader:
    state = require_plain_file(file, CheckpointError).stat()
    return _read_header(file, state.st_size, state.st_mtime_ns)


def _join_parts(first: GgufHeader, count: int) -> GgufHeader:
    """Return the header of a model in parts, which are named by their number and how many."""
    named = PART.search(first.file.name)
    if named is None or (int(named[1]), int(named[2])) != (1, count):
        raise CheckpointError(
            f"{first.file} is one of {count} parts of a model; give the first, under its own name "
            f"(NAME-00001-of-{count:05}.gguf)"
        )
    stem = first.file.name[: named.start()]
    parts, tensors = [first], dict(first.tensors)
    for number in range(1, count):
        path = first.file.with_name(f"{stem}-{number + 1:05}-of-{count:05}.gguf")
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing, part {number + 1} of {count} of a model; fetch it"
            )
        part = _read_part(path)
        place = part.metadata.get(SPLIT_NUMBER), part.metadata.get(SPLIT_COUNT)
        if place != (number, count) or tensors.keys() & part.tensors.keys():
            raise CheckpointError(
                f"{part.file} is not part {number + 1} of {first.file}; fetch both again"
            )
        parts.append(part)
        tensors |= part.tensors
    if len(tensors) != first.metadata.get(SPLIT_TENSORS, len(tensors)):
        raise CheckpointError(
            f"{first.file} and its parts have {len(tensors)} tensors; by its header they are "
            f"{first.metadata[SPLIT_TENSORS]}: a part is of another model; fetch them again"
        )
    digest = hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest()
    files = tuple(part.file for part in parts)
    return replace(first, tensors=tensors, digest=digest, files=files)


@lru_cache(maxsize=64)
def _read_header(file: Path, size: int, _modified: int) -> GgufHeader:
    with file.open("rb") as opened:
        cursor = _Cursor(file, opened, size)
        num_tensors, num_values = _read_counts(cursor)
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.text()
            metadata[key] = _read_value(cursor, cursor.number(UINT32))
        entries = [_read_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.damaged(f"general.alignment is {alignment!r}")
    start = math.ceil(cursor.position / alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for entry in entries:
        name, offset = entry.name, start + entry.offset
        if name in tensors:
            raise cursor.damaged(f"it has two tensors {name}")
        if (end := offset + entry.num_bytes) > size:
            raise CheckpointError(
                f"{file} is truncated: it ends at byte {size}, the tensor {name} at byte {end}; "
                "fetch it again"
            )
        tensors[name] = replace(entry, offset=offset)
    return GgufHeader(file, metadata, tensors, cursor.digest(), (file,))


def find_tokens(header: GgufHeader, texts: Sequence[str]) -> list[int]:
    """Return the ids of the vocabulary's tokens with these texts."""
    wanted = {text.encode() for text in texts}
    with header.file.open("rb") as opened:
        cursor = _Cursor(header.file, opened, header.file.stat().st_size)
        for _ in range(_read_counts(cursor)[1]):
            key, kind = cursor.text(), cursor.number(UINT32)
            if key == TOKENS:
                cursor.advance(UINT32.size)  # the type of strings
                places = range(cursor.number(UINT64))
                return [at for at in places if cursor.take(cursor.number(UINT64)) in wanted]
            _read_value(cursor, kind)
    return []


class _Cursor:
    """Reads a header from front to back, never past the file's end or the longest header."""

    def __init__(self, file: Path, opened: BinaryIO, size: int):
        self.file = file
        self.position = 0
        self._opened = opened
        self._read = bytearray()
        """The file's first bytes, more than were asked for."""
        self._size = size

    def digest(self) -> str:
        return hashlib.sha256(memoryview(self._read)[: self.position]).hexdigest()

    def damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.file} is a damaged GGUF file ({reason}); fetch it again")

    def advance(self, num_bytes: int) -> int:
        """Passes so many bytes, which are read then; returns the position of the first.

        Raises:
            CheckpointError: there are fewer.
        """
        first, self.position = self.position, self.position + num_bytes
        if self.position > len(self._read):
            self._read_on()
        return first

    def _read_on(self) -> None:
        if self.position > MAX_HEADER_BYTES < self._size:
            raise self.damaged(f"its header has more than {MAX_HEADER_BYTES} bytes")
        if self.position > self._size:
            raise CheckpointError(
                f"{self.file} is truncated: it ends at byte {self._size}, inside its header; "
                "fetch it again"
            )
        missing = self.position - len(self._read)
        self._read += self._opened.read(max(missing, CHUNK_BYTES))
        if self.position > len(self._read):
            raise self.damaged("it became shorter while it was read")

    def take(self, num_bytes: int) -> bytes:
        first = self.advance(num_bytes)
        return bytes(self._read[first : self.position])

    def number(self, form: struct.Struct) -> Any:
        first = self.advance(form.size)
        return form.unpack_from(self._read, first)[0]

    def text(self) -> str:
        data = self.take(self.number(UINT64))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"{data[:40]!r} is no UTF-8") from error


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Return how many tensors and metadata values follow."""
    magic = cursor.take(len(MAGIC))
    if magic != MAGIC:
        raise CheckpointError(
            f"{cursor.file} is no GGUF file: it begins with {magic!r}, not {MAGIC!r}"
        )
    version = cursor.number(UINT32)
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise CheckpointError(
            f"{cursor.file} is a big-endian GGUF file; convert the original checkpoint without "
            "--bigendian"
        )
    if version not in VERSIONS:
        raise CheckpointError(
            f"{cursor.file} has version {version} of GGUF; versions "
            f"{' and '.join(map(str, VERSIONS))} are read. Convert the original checkpoint again"
        )
    counts = cursor.number(UINT64), cursor.number(UINT64)
    if max(counts) > MAX_ENTRIES:
        tensors, values = counts
        raise cursor.damaged(f"it claims {tensors} tensors and {values} values")
    return counts


def _read_value(cursor: _Cursor, kind: int) -> Any:
    """Read one value; of an array of strings or of a vocabulary's numbers, return the length."""
    if kind == STRING:
        return cursor.text()
    if kind in NUMBERS:
        return cursor.number(NUMBERS[kind])
    if kind != ARRAY:
        raise cursor.damaged(f"a value of the unknown type {kind}")
    kind, length = cursor.number(UINT32), cursor.number(UINT64)
    if kind in NUMBERS and length <= MAX_LAYERS:
        return tuple(cursor.number(NUMBERS[kind]) for _ in range(length))
    if kind in NUMBERS:
        cursor.advance(length * NUMBERS[kind].size)
    elif kind == STRING:
        for _ in range(length):
            cursor.advance(cursor.number(UINT64))
    else:
        raise cursor.damaged(f"an array of the unknown type {kind}")
    return length


@cache
def _read_types() -> dict[int, tuple[str, int, int]]:
    """Return the name of each type, and the weights and bytes of its blocks, by its number."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    return {kind.value: (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}


def _read_entry(cursor: _Cursor) -> GgufTensor:
    """Read what is said of one tensor, with its offset from the first one's."""
    name, num_dimensions = cursor.text(), cursor.number(UINT32)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.damaged(f"{name} has {num_dimensions} dimensions")
    shape = tuple(cursor.number(UINT64) for _ in range(num_dimensions))[::-1]
    number, offset = cursor.number(UINT32), cursor.number(UINT64)
    # One of another number is refused by its name, with all others that are not served.
    kind, per_block, block_bytes = _read_types().get(number, (f"number {number}", 1, 0))
    if block_bytes and (0 in shape or shape[-1] % per_block):
        raise cursor.damaged(f"{name} is {shape}, which are no blocks of {kind}")
    num_bytes = math.prod(shape) // per_block * block_bytes
    return GgufTensor(cursor.file, name, shape, kind, offset, num_bytes)


KINDS = (
    *("F32", "F16", "BF16"),
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
"""Types of tensors that are read: all that ggml multiplies and gguf decodes."""
EXPERTS = re.compile(r"\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)$")


def check_gguf(file: Path) -> None:
    """Check that a file holds a Mixture-of-Experts model that can be served.

    Raises:
        CheckpointError: it is damaged, of another architecture, or has tensors of other types; the
            message says what is served, or a command that converts.
    """
    header, architectures = read_header(file), read_architectures()
    served = ", ".join(f"{name} ({known.models})" for name, known in architectures.items())
    name = header.architecture
    if not any(map(EXPERTS.search, header.tensors)):
        raise CheckpointError(
            f"{header.file} is not a Mixture-of-Experts model: its architecture {name!r} has no "
            f"routed experts here. Served from GGUF are {served}"
        )
    if name not in architectures:
        raise CheckpointError(
            f"{header.file} has the architecture {name!r}, which is not served. Served from GGUF "
            f"are {served}; of any other, give the original checkpoint (config.json and "
            "safetensors files)"
        )
    for tensor in header.tensors.values():
        if tensor.kind not in KINDS:
            raise CheckpointError(
                f"{header.file}: {tensor.name} has the type {tensor.kind}, which is not served "
                f"({', '.join(KINDS)} are). Convert it: llama-quantize --allow-requantize "
                f"{header.file} OUTPUT.gguf Q4_K_M"
            )
