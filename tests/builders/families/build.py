"""Builds a family's tiny random model and saves it as the Hub has it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.builders.families.fields import OTHER, TEXT
from tests.builders.families.table import FAMILIES, Family
from tests.builders.saved import saved_once

TASKS = ("MultimodalLM", "CausalLM", "Seq2SeqLM", "TokenClassification")
WHOLE_FIRST = [getattr(transformers, f"AutoModelFor{task}") for task in TASKS]
"""The Hub's checkpoints of a family with vision hold all of it."""


class UnbuildableError(Exception):
    """Transformers has no class of the family that computes text."""


@saved_once
def save_family(folder: Path, family: Family | str, *, dtype=torch.float32, fused=False) -> Path:
    """Several shards and their index; `fused`: experts as the model holds them in memory.

    Here and below a family may be given by its name in the table.
    """
    model = tiny_model(family).to(dtype)
    model.save_pretrained(folder, max_shard_size="100KB", save_original_format=not fused)
    return folder


def tiny_model(family: Family | str) -> PreTrainedModel:
    """Random weights that route different tokens to different experts."""
    family = _named(family)
    config = tiny_config(family)
    torch.manual_seed(0)
    auto = next((auto for auto in WHOLE_FIRST if type(config) in auto._model_mapping), None)
    if auto is None:
        raise UnbuildableError(family.name)
    model = auto.from_config(config)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "correction_bias" in name or "expert_bias" in name:
            # Zero in a new model; in a trained one, what is chosen is not what has the best logit.
            torch.nn.init.normal_(tensor.data, std=0.1)
        elif tensor.ndim > 1 and not tensor.any():
            # Some families' new routers send every token to the same experts.
            tensor.data = _spread(tensor)
    for name, value in family.generation.items():
        setattr(model.generation_config, name, value)
    return model.eval()


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Random values; in a table of experts by token id, different ones in each row."""
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, dtype=tensor.dtype) * 0.2
    return torch.rand(len(tensor), TEXT["num_experts"]).argsort(-1)[:, : tensor.shape[1]]


def _named(family: Family | str) -> Family:
    return FAMILIES[family] if isinstance(family, str) else family


def tiny_config(family: Family | str) -> PreTrainedConfig:
    """The family's configuration with every known size shrunk."""
    family = _named(family)
    cls = CONFIG_MAPPING[family.model_type or family.name]
    return cls(**_fields(cls, TEXT, family.changes))


def _fields(cls: type[PreTrainedConfig], tiny: Mapping, changes: Mapping) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    values = {name: value for name, value in tiny.items() if name in known}
    if "kv_lora_rank" in values:  # latent attention: each head has keys and values of its own
        values["num_key_value_heads"] = values["num_attention_heads"]
    for part, part_cls in cls.sub_configs.items():
        nested = changes.get(part, {})
        if nested is None:
            values[part] = None
            continue
        if part_cls is AutoConfig:
            part_cls = CONFIG_MAPPING[nested["model_type"]]
        values[part] = _fields(part_cls, TEXT if part == "text_config" else OTHER, nested)
    return values | {name: changes[name] for name in changes if name not in cls.sub_configs}
