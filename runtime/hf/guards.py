"""Refuses operations that would silently omit a model's experts, which are in an arena."""

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


def _refuse_copy(_memo: dict[int, Any]) -> NoReturn:
    raise CheckpointError(
        "this model's experts live in moecast's arena and are not copied with it; "
        "load the checkpoint a second time"
    )


def _refuse_pickle(_protocol: object) -> NoReturn:
    raise CheckpointError(
        "this model's experts live in moecast's arena and are not pickled with it; "
        "copy the checkpoint that it was loaded from"
    )


def guard_model(model: PreTrainedModel, layers: Iterable[MoeLayer]) -> None:
    """Make saving, copying and pickling anything that contains experts an error."""
    model.save_pretrained = refuse_to_save
    for layer in layers:
        layer.experts.register_state_dict_pre_hook(_refuse_state)
        parts = layer.name.split(".")
        for end in range(len(parts) + 1):
            around = vars(model.get_submodule(".".join(parts[:end])))
            around["__deepcopy__"] = _refuse_copy
            around["__reduce_ex__"] = _refuse_pickle
