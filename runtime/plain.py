"""Plain Transformers with every expert in memory: the reference for exactness."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from runtime.hf.quiet import progress_for_terminals
from runtime.hf.weights import own_weights


def load_plain(folder: Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """The model as Transformers loads it, with its own eager experts and aligned weights."""
    with progress_for_terminals():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, experts_implementation="eager", local_files_only=True
        )
    return own_weights(model).eval()
