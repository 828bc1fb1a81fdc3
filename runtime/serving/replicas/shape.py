"""How many layers with experts a model has, and how many experts, without loading it."""

from pathlib import Path

import torch
from transformers import AutoConfig

from runtime.hf.classes import model_class
from runtime.hf.layers import moe_layers


def shape_of(folder: Path) -> tuple[int, int]:
    """Layers and the largest number of experts of one; the model is made without memory.

    Raises:
        CheckpointError: no experts.
    """
    cls, config = model_class(AutoConfig.from_pretrained(folder))
    with torch.device("meta"):
        layers = moe_layers(cls(config))
    return len(layers), max(layer.kind.num_experts(layer.experts) for layer in layers)
