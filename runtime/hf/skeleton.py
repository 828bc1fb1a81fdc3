"""Builds a model from its configuration alone: every parameter has a shape and no memory."""

import copy
from pathlib import Path
from typing import NoReturn

import torch

from runtime.hf.layers import find_moe_layers
from runtime.hf.loading import StrippedModel, find_model_class, read_config
from runtime.hf.model_faults import explain_loading
from runtime.hf.strip import make_stripped_class


def build_skeleton(folder: Path, *, dtype: str) -> StrippedModel:
    """Build a stripped model of `config.json` on the meta device; nothing else is read.

    Args:
        dtype: of parameters; a quantised checkpoint counts as dequantised.

    Raises:
        CheckpointError: no model class for it, no experts, or a damaged configuration.
    """
    config = copy.deepcopy(read_config(folder))
    config.__dict__.pop("quantization_config", None)
    with explain_loading(folder):
        cls, config = find_model_class(config)
        with torch.device("meta"):
            model = make_stripped_class(cls, _refuse_files)._from_config(
                config, dtype=getattr(torch, dtype)
            )
    return StrippedModel(model.eval(), find_moe_layers(model), [], folder)


def _refuse_files(*_: object) -> NoReturn:
    raise AssertionError("a skeleton reads no file")
