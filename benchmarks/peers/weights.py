"""The weights of one model in one format, in each layout that peers read; written once."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, partial
from pathlib import Path

import torch

from benchmarks.environments import interpreter
from benchmarks.formats import FORMATS, Format, pack_once
from benchmarks.peers.fused import Checkpoint, write_fused
from benchmarks.process import run_program
from benchmarks.reports import print_line
from runtime.config import ModelConfig
from runtime.store.gguf.header import EXPERTS, read_header

LLAMA_CPP = "llama-cpp"
GGUF_FORMATS = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_K_M": "Q4_K_M"}
"""Formats in which all programs read one GGUF file, and what llama.cpp's quantiser calls them."""
QUANTISER = Path(__file__).parent / "workers" / "quantise_gguf.py"


class WeightLayout(StrEnum):
    """The layouts of the same values that peers read."""

    PACKED = "packed"
    """The checkpoint for everything but the experts, and this project's packed store for these."""
    SEPARATE = "separate"
    """One tensor for each matrix of each expert."""
    FUSED = "fused"
    """Two tensors for all experts of a layer."""
    GGUF = "gguf"


@dataclass(frozen=True)
class WeightPaths:
    path: Path
    store: Path | None = None
    """Packed store of the experts."""

    def files(self) -> list[Path]:
        """Returns all files that weights are read from."""
        roots = [self.path] if self.store is None else [self.path, self.store]
        return [file for root in roots for file in list_files(root)]


def list_files(root: Path) -> list[Path]:
    return [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())


def write_once(path: Path, write: Callable[[Path, Path], None], source: Path) -> Path:
    """Converts a checkpoint unless that was done before; the result is complete or absent."""
    if not path.exists():
        print_line(f"writing {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path = path.with_name(f"{path.name}.partial.{os.getpid()}")
        write(source, partial_path)
        partial_path.rename(path)
    return path


def weight_bytes(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """Returns the bytes of all experts, and of all other weights, in one dtype."""
    checkpoint = Checkpoint(folder, dtype)
    experts = others = 0
    for key in checkpoint:
        if ".mlp.experts." in key:
            experts += checkpoint.num_bytes(key)
        else:
            others += checkpoint.num_bytes(key)
    return experts, others


@cache
def pack_store(model: Path, name: str, output: Path) -> tuple[Path, int]:
    """Packs the experts in a format, or verifies those of an earlier run; returns their bytes."""
    output.parent.mkdir(parents=True, exist_ok=True)
    return pack_once(ModelConfig(id=str(model)), FORMATS[name], output)


@dataclass(frozen=True)
class ModelWeights:
    """One model in one format: a name of `benchmarks.formats.FORMATS` or of `GGUF_FORMATS`."""

    model: Path
    work: Path
    environments: Path
    format: str = "float32"

    @property
    def dtype(self) -> str:
        """Dtype of activations, and of weights that are not quantised."""
        return FORMATS.get(self.format, Format("bfloat16")).dtype

    @property
    def is_gguf(self) -> bool:
        """Whether all programs read one GGUF file."""
        return self.format in GGUF_FORMATS

    @property
    def folder(self) -> Path:
        return self.work / "weights" / self.model.name

    def write(self, layout: WeightLayout) -> WeightPaths:
        """Returns the weights in a layout, which may have been written before.

        Raises:
            ProcessFailed: llama.cpp has no environment, or cannot quantise the model.
            MoecastError: llama.cpp's file cannot be written for this kind of model.
        """
        match layout:
            case WeightLayout.PACKED:
                return WeightPaths(self.model, self.pack()[0])
            case WeightLayout.SEPARATE:
                return WeightPaths(self.model)
            case WeightLayout.FUSED:
                write = partial(write_fused, dtype=getattr(torch, self.dtype))
                return WeightPaths(write_once(self.folder / self.dtype, write, self.model))
            case WeightLayout.GGUF:
                return WeightPaths(self._write_gguf())

    def measure(self) -> tuple[int, int]:
        """Returns the bytes of all experts, and of all other weights, in this format."""
        if not self.is_gguf:
            return self.pack()[1], weight_bytes(self.model, getattr(torch, self.dtype))[1]
        tensors = read_header(self._write_gguf()).tensors.values()
        experts = sum(tensor.num_bytes for tensor in tensors if EXPERTS.search(tensor.name))
        return experts, sum(tensor.num_bytes for tensor in tensors) - experts

    def pack(self) -> tuple[Path, int]:
        """Returns this project's packed store, and the bytes of all experts in it."""
        return pack_store(self.model, self.format, self.folder / f"{self.format}-store")

    def _write_gguf(self) -> Path:
        # Imported here because gguf comes with the `dev` extra only.
        from benchmarks.peers.gguf_file import write_gguf

        output = self.folder / f"{self.format}.gguf"
        if not self.is_gguf:
            return write_once(
                output, partial(write_gguf, dtype=getattr(torch, self.dtype)), self.model
            )
        python = interpreter(LLAMA_CPP, self.environments)

        def quantise(source: Path, target: Path) -> None:
            run_program([python, QUANTISER, source, target, GGUF_FORMATS[self.format]])

        if output.exists():
            return output
        return write_once(output, quantise, replace(self, format=self.dtype)._write_gguf())
