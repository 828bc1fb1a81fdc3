"""Atomic, checksummed checkpoints without pickled objects.

Lightning's own writes go to the system's temporary folder first and are not flushed: on another
file system, a full disk or a kill leaves a torn file where a good one was.

The file is one line, `moecast-checkpoint 1 SHA256`, and then a safetensors file: every tensor of
the checkpoint, and in its metadata the tree that they hang in, as JSON.
"""

import hashlib
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from safetensors.torch import load, save
from torch import nn

from predictors.files import write_atomic
from train.errors import TrainCheckpointError
from zoo.storage.folder import FolderStorage

MAGIC = b"moecast-checkpoint 1 "
TENSOR, PAIRS, TUPLE = "__tensor__", "__pairs__", "__tuple__"


def pack(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The tree as JSON values, its tensors moved into `tensors` under numbered names."""
    if isinstance(tree, torch.Tensor):
        name = f"{len(tensors)}"
        tensors[name] = tree.detach().cpu().contiguous().clone()
        return {TENSOR: name}
    if isinstance(tree, dict):
        if all(isinstance(key, str) for key in tree):
            return {key: pack(value, tensors) for key, value in tree.items()}
        # JSON's keys are strings; an optimiser numbers its parameters.
        return {PAIRS: [[pack(key, tensors), pack(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, tuple):
        return {TUPLE: [pack(branch, tensors) for branch in tree]}
    if isinstance(tree, list):
        return [pack(branch, tensors) for branch in tree]
    assert tree is None or isinstance(tree, bool | int | float | str), type(tree)
    return tree


def unpack(tensors: dict[str, torch.Tensor], node: dict[str, Any]) -> Any:
    """The value that a JSON object of the tree stands for, its branches unpacked before."""
    if TENSOR in node:
        return tensors[node[TENSOR]]
    if PAIRS in node:
        return dict(node[PAIRS])
    return tuple(node[TUPLE]) if TUPLE in node else node


def to_bytes(checkpoint: dict[str, Any]) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(pack(dict(checkpoint), tensors))
    body = save(tensors, metadata={"tree": tree})
    return MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def from_bytes(data: bytes, *, what: str) -> dict[str, Any]:
    """The checkpoint in a file's bytes; CheckpointError when they are not what was written."""
    head, _, body = data.partition(b"\n")
    if (
        not head.startswith(MAGIC)
        or hashlib.sha256(body).hexdigest().encode() != head[len(MAGIC) :]
    ):
        raise TrainCheckpointError(f"{what} is torn or was altered; start over with overwrite=true")
    length = int.from_bytes(body[:8], "little")
    tree = json.loads(body[8 : 8 + length])["__metadata__"]["tree"]
    return json.loads(tree, object_hook=partial(unpack, load(body)))


class SafeCheckpointIO(CheckpointIO):
    """Reads and writes checkpoints for Lightning."""

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: Any,
        storage_options: Any = None,  # noqa: ARG002
    ) -> None:
        write_atomic(Path(path), to_bytes(checkpoint))

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any = None,  # noqa: ARG002
        weights_only: bool | None = None,  # noqa: ARG002
    ) -> dict[str, Any]:
        return from_bytes(Path(path).read_bytes(), what=str(path))

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


COPIES = 8
"""Times that the weights' bytes are on the disk at most: the resumable checkpoint with Adam's two
moments (3), the one that replaces it (3), the best weights and the entries."""
SPARE_BYTES = 32 << 20
"""Results, curves and the report."""


def require_training_space(run_dir: Path, networks: Iterable[nn.Module]) -> None:
    """Raises DiskFullError if checkpoints and entries of the networks do not fit on the disk."""
    weights = sum(p.nbytes for network in networks for p in network.parameters())
    FolderStorage(run_dir).require_space(
        COPIES * weights + SPARE_BYTES,
        "the training's checkpoints and zoo entries",
        advice="Free some, or choose a folder on another disk (run_dir=PATH)",
    )
