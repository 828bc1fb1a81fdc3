"""Refuses what would silently leave a model's experts out: they are not in it but in an arena."""

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from runtime.errors import CheckpointError
from runtime.hf.layers import MoeLayer


def refuse_to_save(*_args: Any, **_kwargs: Any) -> NoReturn:
    """Transformers would write a checkpoint without experts, silently."""
    raise CheckpointError(
        "save_pretrained: this model's experts are not in it but in moecast's arena; "
        "copy the checkpoint that it was loaded from"
    )


def _refuse_state(module: nn.Module, prefix: str, _keep_vars: bool) -> NoReturn:
    raise CheckpointError(
        f"state_dict: the experts of {prefix.rstrip('.') or type(module).__name__} are not in the "
        "model but in moecast's arena; the other parameters are in named_parameters(), the experts "
        "in the checkpoint that it was loaded from"
    )


def guard(model: PreTrainedModel, layers: Iterable[MoeLayer]) -> None:
    """Makes `save_pretrained`, and `state_dict` of whatever contains experts, an error.

    Copying and pickling are refused by what serves the experts (`adapters.served`).
    """
    model.save_pretrained = refuse_to_save
    for layer in layers:
        layer.experts.register_state_dict_pre_hook(_refuse_state)
