"""Checkpoints with each layer's experts in two tensors, as Transformers holds them.

From a checkpoint of one tensor per expert, Transformers 5 builds these two in memory; from this one
it can map them from the file, and Accelerate can offload them. Values change by the dtype only.
"""

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from runtime.store.model_check import WEIGHTS_INDEX as INDEX
from runtime.store.model_check import list_weight_files

EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class Checkpoint:
    """The tensors of a folder of safetensors files by key, read on access in one dtype."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self._files = [safe_open(path, framework="pt") for path in list_weight_files(folder)]
        self._file_of = {key: file for file in self._files for key in file.keys()}  # noqa: SIM118

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __getitem__(self, key: str) -> Tensor:
        return self._file_of[key].get_tensor(key).to(self.dtype)

    def num_bytes(self, key: str) -> int:
        """Returns the size of a tensor without reading it."""
        return math.prod(self._file_of[key].get_slice(key).get_shape()) * self.dtype.itemsize


def fused_tensors(source: Checkpoint) -> Iterator[dict[str, Tensor]]:
    """Yields each layer's experts, [E, 2F, D] (gate, then up) and [E, D, F]; then the rest."""
    experts: dict[str, set[int]] = {}
    rest = []
    for key in source:
        if match := EXPERT.fullmatch(key):
            experts.setdefault(match[1], set()).add(int(match[2]))
        else:
            rest.append(key)
    for name in sorted(experts):
        gate_up = torch.stack(
            [
                torch.cat(
                    [source[f"{name}.{number}.{part}_proj.weight"] for part in ("gate", "up")]
                )
                for number in sorted(experts[name])
            ]
        )
        down = [source[f"{name}.{number}.down_proj.weight"] for number in sorted(experts[name])]
        yield {f"{name}.gate_up_proj": gate_up, f"{name}.down_proj": torch.stack(down)}
    yield {key: source[key] for key in rest}


def write_fused(folder: Path, output: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes a file for each layer's experts and one for all else, a layer at a time."""
    output.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(fused_tensors(Checkpoint(folder, dtype))):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, output / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    for path in folder.glob("*.json"):
        if path.name != INDEX:
            shutil.copy(path, output / path.name)
    config = json.loads((output / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (output / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (output / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}) + "\n")
