"""Plain Transformers with every expert in memory: the reference for exactness."""

from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from runtime.hf.classes import model_class
from runtime.hf.quiet import progress_bars
from runtime.hf.weights import unmap_weights


def load_plain(folder: Path, *, dtype: torch.dtype | str) -> PreTrainedModel:
    """The model as Transformers loads it, with its own eager experts and aligned weights."""
    cls, config = model_class(AutoConfig.from_pretrained(folder))
    with progress_bars():
        model = cls.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            experts_implementation="eager",
            local_files_only=True,
        )
    return unmap_weights(model).eval()
