"""Tiny models whose files are written again instead of being made anew."""

import functools
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

LARGEST_KEPT = 1 << 20
"""Bytes of a model; most have a tenth of it."""


def saved_once(save: Callable[..., Path]) -> Callable[..., Path]:
    """Has `save(folder, ...)` make the same model once in a process.

    Random numbers go on as after the first call.
    """
    kept: dict[str, tuple[dict[str, bytes], torch.Tensor]] = {}

    @functools.wraps(save)
    def write(folder: Path, *args: Any, **options: Any) -> Path:
        key = repr((args, options))
        if key in kept:
            files, random_state = kept[key]
            torch.set_rng_state(random_state)
        else:
            with TemporaryDirectory() as temporary:
                made = save(Path(temporary) / "model", *args, **options)
                files = {file.name: file.read_bytes() for file in made.iterdir()}
            if sum(map(len, files.values())) <= LARGEST_KEPT:
                kept[key] = files, torch.get_rng_state()
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return folder

    return write
