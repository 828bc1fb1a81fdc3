"""Plain Transformers with every expert in memory: the reference for exactness."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from runtime.hf.quiet import progress_for_terminals


def load_plain(folder: Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """The model as Transformers loads it, with its own eager experts and aligned weights.

    Weights are cloned: kernels take another path on the unaligned addresses of a memory-mapped
    file, and then the last bits of a result differ for no reason of the model's.
    """
    with progress_for_terminals():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, experts_implementation="eager", local_files_only=True
        )
    seen: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        parameter.data = seen.setdefault(parameter.data_ptr(), parameter.data.clone())
    return model.eval()
