"""ggml's types of rows, and the library that multiplies, decodes and encodes them.

The library is that of the package `libggml-python`, which is ggml as its authors release it, built
for each platform. Where it is missing, rows are decoded by PyTorch or gguf, and multiplied by
PyTorch.
"""

import math
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from platform import machine
from types import ModuleType

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor
from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

from runtime.errors import StoreError

PACKAGE = "libggml-python"
SERIES = "0.20."
"""The library's tables have no version of their own; those of this one are read."""
NUM_TYPES = 43
"""Types of this series (GGML_TYPE_COUNT)."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of weights that are not quantised."""
PLAIN_KINDS = {dtype: kind for kind, dtype in PLAIN.items()}


BLOCKS_AT_ONCE = 64
"""Blocks that a thread decodes at once, or a divisor of it."""


@dataclass(frozen=True)
class GgmlType:
    """A type of rows."""

    name: str
    """As in GGUF: `Q4_K`."""
    number: int
    block: int
    """Weights of a block."""
    block_bytes: int

    def row_bytes(self, num_weights: int) -> int:
        return num_weights // self.block * self.block_bytes


NO_WEIGHTS = ("F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K")
"""Types of indices, of double precision, and of activations."""
TYPES = {
    kind.name: GgmlType(kind.name, kind.value, *GGML_QUANT_SIZES[kind])
    for kind in GGMLQuantizationType
    if kind.name not in NO_WEIGHTS
}
"""Every type that weights may have, by name."""


@cache
def _open() -> tuple[ModuleType | None, str]:
    """Return the compiled products, or why there are none."""
    try:
        from runtime.store.ggml import products
    except ImportError:
        return None, "moecast was installed without its compiled code"
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT" and machine() == "x86_64":
        return None, f"this processor has no AVX2, for which {PACKAGE} is compiled"
    spec = find_spec("libggml")
    if spec is None or not spec.submodule_search_locations:
        return None, f"the package {PACKAGE} is not installed"
    folder = Path(next(iter(spec.submodule_search_locations)))
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        found = "unknown"
    if not found.startswith(SERIES):
        return None, f"{PACKAGE} has the version {found}, and {SERIES}* is read"
    suffix = "dylib" if sys.platform == "darwin" else "so"
    paths = sorted(folder.glob(f"lib*/libggml-cpu.{suffix}"))
    if not paths:
        return None, f"{folder} has no libggml-cpu.{suffix}"
    try:
        products.open(str(paths[0]), NUM_TYPES)
    except OSError as error:
        return None, f"{paths[0]} cannot be used ({error})"
    wrong = [kind.name for kind in TYPES.values() if not _agrees(products, kind)]
    return (None, f"{paths[0]} has another {', '.join(wrong)}") if wrong else (products, "")


def _agrees(products: ModuleType, kind: GgmlType) -> bool:
    """Return whether the library has a type as files have it, or does not have it."""
    described = products.describe(kind.number)
    return described is None or described[1:3] == (kind.block, kind.block_bytes)


def find_products() -> ModuleType | None:
    """Return `products.c` with the library opened; None: rows are decoded, then multiplied."""
    return _open()[0]


def explain_missing() -> str:
    """Return why there are no products, in a few words."""
    return _open()[1]


@cache
def multiplies(kind: str) -> bool:
    """Return whether the library is there, and multiplies rows of a type."""
    products = find_products()
    described = None if products is None else products.describe(TYPES[kind].number)
    return described is not None and described[3]


def decode_rows(kind: str, stored: Tensor) -> Tensor:
    """Return the weights of whole blocks, uint8, in order: `(n,)` on their device.

    They are float32, or as they are stored where that is no quantised type.
    """
    if kind in PLAIN:
        return stored.view(PLAIN[kind])
    type_, products = TYPES[kind], find_products()
    if stored.device.type == "cpu" and products is not None:
        stored, num_blocks = stored.contiguous(), stored.numel() // type_.block_bytes
        weights = torch.empty(num_blocks * type_.block)
        at_once = math.gcd(num_blocks, BLOCKS_AT_ONCE)
        products.decode(
            type_.number,
            num_blocks // at_once,
            at_once * type_.block,
            stored.data_ptr(),
            weights.data_ptr(),
            torch.get_num_threads(),
        )
        return weights
    if type_.number in GGML_BLOCK:
        return dequantize(stored, type_.number)
    if stored.device.type != "cpu":
        return decode_rows(kind, stored.cpu()).to(stored.device)
    return torch.from_numpy(quants.dequantize(stored.numpy(), GGMLQuantizationType[kind])).view(-1)


def encode_rows(kind: str, weights_NK: Tensor) -> Tensor:
    """Return rows as the bytes `(n,)` of a type, uint8.

    Raises:
        StoreError: The library is missing, and nothing else writes this type.
    """
    type_, products = TYPES[kind], find_products()
    weights_NK = weights_NK.float().contiguous()
    num_rows, num_columns = weights_NK.shape
    if products is None:
        try:
            rows = quants.quantize(weights_NK.numpy(), GGMLQuantizationType[kind])
        except NotImplementedError as error:
            raise StoreError(f"{kind} is written by ggml only; {explain_missing()}") from error
        return torch.from_numpy(rows).view(torch.uint8).view(-1)
    stored = torch.empty(num_rows * type_.row_bytes(num_columns), dtype=torch.uint8)
    products.encode(
        type_.number,
        num_rows,
        num_columns,
        weights_NK.data_ptr(),
        stored.data_ptr(),
        torch.get_num_threads(),
    )
    return stored
