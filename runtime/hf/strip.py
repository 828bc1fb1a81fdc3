"""Loads a model without its experts: a same-named subclass drops them before a byte is read."""

import copy
import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.config import DTYPES, PageCache
from runtime.errors import CheckpointError
from runtime.hf.layers import MoeLayer, find_adapter, find_expert_banks
from runtime.store.conversion import read_smaller_blocks
from runtime.store.files import FileReader
from runtime.store.integer_scheme import IntegerScheme
from runtime.store.integer_tensor import IntegerTensor, view_integers
from runtime.store.model_check import list_names, list_weight_files
from runtime.store.model_source import has_no_experts
from runtime.store.tensor_index import StoredTensor, read_tensor_index
from runtime.store.weight_plan import FusedParameter, WeightPlan, collect_sources, plan_weights

log = logging.getLogger(__name__)

Banks = dict[str, dict[str, WeightPlan]]

OLD_BUFFERS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Names in checkpoints of old versions of Transformers, which computes them now."""
TAKEN = "moecast_parameters"
"""Attribute of an experts module: what was taken out of it."""


def strip_experts(model: nn.Module) -> list[FusedParameter]:
    """Takes the experts' parameters out of every experts module of a model on the meta device.

    May be called again: what is stripped already is reported, not lost.
    """
    parameters: list[FusedParameter] = []
    # Removed parameters cannot be tied; the weight plans note the tie instead.
    ties = getattr(model, "all_tied_weights_keys", {})
    for bank, module in find_expert_banks(model).items():
        adapter = find_adapter(module)
        assert adapter is not None
        if TAKEN not in vars(module):
            taken = adapter.strip(bank, module)
            vars(module)[TAKEN] = [
                dataclasses.replace(p, tied_to=ties.pop(p.target, None)) for p in taken
            ]
        # Prevents Transformers from initialising the module with random numbers.
        module._is_hf_initialized = True
        parameters.extend(vars(module)[TAKEN])
    return parameters


def list_taken_parameters(layers: Iterable[MoeLayer]) -> list[FusedParameter]:
    """The parameters that were taken out of the layers' experts modules."""
    return [parameter for layer in layers for parameter in vars(layer.experts)[TAKEN]]


def list_source_tensors(
    banks: Iterable[Mapping[str, WeightPlan]], *, with_tied: bool = False
) -> set[str]:
    """Names of the checkpoint's tensors that experts are made of, by default only they.

    Args:
        with_tied: also those of experts that are tied to other parameters.
    """
    return name_tensors(
        extent
        for bank in banks
        for plan in bank.values()
        if with_tied or plan.parameter.tied_to is None
        for extent in plan.tensors()
    )


def name_tensors(extents: Iterable[StoredTensor]) -> set[str]:
    """Names of tensors; of packed integers also that of the weight that they stand for."""
    names: set[str] = set()
    for extent in extents:
        names.add(extent.key)
        if isinstance(extent, IntegerTensor):
            names.update(extent.stored_names)
    return names


class WatchedTensor:
    """A tensor that is read, and notes its name, when Transformers asks for it.

    Transformers would map the file, and a page that cannot be read would kill the process.
    """

    def __init__(self, tensor: StoredTensor, files: FileReader, read: set[str]):
        self._tensor, self._files, self._read = tensor, files, read

    def is_floating_point(self) -> bool:
        return self._tensor.dtype.is_floating_point

    def __getitem__(self, part: Any) -> Tensor:
        self._read.add(self._tensor.key)
        return self._tensor.load(self._files)[part]


OpenTensors = Callable[
    [PreTrainedModel, list[FusedParameter], Sequence[str] | None, Any],
    AbstractContextManager[dict[str, Any]],
]
"""`(model, its experts' parameters, files, load configuration) -> the other tensors`, which are
read while the context is open."""


@contextmanager
def open_safetensors(
    found: Callable[[Banks], None],
    unused: set[str],
    scheme: IntegerScheme | None,
    model: PreTrainedModel,
    parameters: list[FusedParameter],
    files: Sequence[str] | None,
    load_config: Any,
) -> Iterator[dict[str, Any]]:
    """Index the experts in safetensors files, for `found`, and open the other tensors.

    Args:
        unused: gets the names of tensors that are no part of the model, such as layers that predict
            several tokens; a line of the log replaces the library's table of them.
        scheme: how weights are stored as packed integers; the library gets them dequantised.

    Raises:
        CheckpointError: files of another format, or damaged ones.
    """
    assert files is not None
    folder = Path(files[0]).parent
    known = [*(model._keys_to_ignore_on_load_unexpected or ()), *OLD_BUFFERS]
    model._keys_to_ignore_on_load_unexpected = {""}  # all
    extents = _read_index(files, scheme)
    planned = [] if has_no_experts(folder) else parameters
    indexed = plan_weights(model, planned, extents, load_config.weight_mapping)
    found(indexed)
    # The library would look at every name of every expert, only to leave it out.
    names = sorted(extents.keys() - list_source_tensors(indexed.values()))
    read: set[str] = set()
    with FileReader(page_cache=PageCache.KEEP) as reader:
        yield {name: WatchedTensor(extents[name], reader, read) for name in names}
    left = set(names) - read - list_source_tensors(indexed.values(), with_tied=True)
    unused |= name_tensors(extents[name] for name in left)
    if unknown := sorted(name for name in left if not re.search("|".join(known), name)):
        log.warning(
            "%s: %d tensors are no part of %s and are left out, such as %s",
            *(folder, len(unknown), type(model).__name__, unknown[0]),
        )


def _read_index(files: Sequence[str], scheme: IntegerScheme | None) -> dict[str, StoredTensor]:
    """Index the files that the library loads, packed integers as the weights that they stand for.

    Raises:
        CheckpointError: packing would read other files, or some are damaged.
    """
    folder = Path(files[0]).parent
    if (listed := list_weight_files(folder)) != [Path(file) for file in files]:
        raise CheckpointError(
            f"{folder}: Transformers loads {list_names(Path(file).name for file in files)}, not "
            f"{list_names(file.name for file in listed)}; rename or remove the other weights"
        )
    stored = read_tensor_index(files)
    return stored if scheme is None else view_integers(stored, scheme)


def make_checked_class(
    cls: type[PreTrainedModel], scheme: IntegerScheme | None
) -> type[PreTrainedModel]:
    """A subclass of the same name that loads all, after the checks of a model without its experts.

    What is missing is named as it is there, before the library fails or makes it up.

    Args:
        scheme: how weights are stored as packed integers, which the library dequantises.
    """

    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        parameters = strip_experts(stripped := copy.deepcopy(model))
        extents = _read_index(checkpoint_files, scheme)
        model._keys_to_ignore_on_load_unexpected = {""}
        read_smaller_blocks(load_config.weight_mapping)
        collect_sources(stripped, parameters, extents, load_config.weight_mapping)
        return cls._load_pretrained_model(
            model, state_dict, checkpoint_files, load_config, *args, **kwargs
        )

    return _subclass(cls, _load_pretrained_model=staticmethod(_load_pretrained_model))


def _subclass(cls: type[PreTrainedModel], **members: Any) -> type[PreTrainedModel]:
    """A subclass of the same name, because conversion rules are looked up by it."""
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {**named, **members})


def make_stripped_class(
    cls: type[PreTrainedModel], open_tensors: OpenTensors
) -> type[PreTrainedModel]:
    """A subclass of the same name whose `from_pretrained` never allocates or reads an expert.

    `__init__` strips on the meta device, before any memory is planned. `_load_pretrained_model` is
    the last point before bytes are read: the modules are final there, and the files and renaming
    rules are those that the library itself will use; `open_tensors` gets them.
    """

    def __init__(self, config, *args, **kwargs):
        cls.__init__(self, config, *args, **kwargs)
        strip_experts(self)

    def _load_pretrained_model(model, _state_dict, checkpoint_files, load_config, *args, **kwargs):
        parameters = strip_experts(model)
        if not parameters:
            raise CheckpointError(f"{cls.__name__} has no routed experts that moecast can serve")
        read_smaller_blocks(load_config.weight_mapping)
        with open_tensors(model, parameters, checkpoint_files, load_config) as tensors:
            return cls._load_pretrained_model(
                model, tensors, checkpoint_files, load_config, *args, **kwargs
            )

    return _subclass(
        cls, __init__=__init__, _load_pretrained_model=staticmethod(_load_pretrained_model)
    )


def refuse_to_save(*_args: Any, **_kwargs: Any) -> NoReturn:
    """Transformers would write a checkpoint without experts, silently."""
    raise CheckpointError(
        "save_pretrained: this model's experts are not in it but in moecast's arena; "
        "copy the checkpoint that it was loaded from"
    )


def _refuse_to_copy(_protocol: int) -> NoReturn:
    raise CheckpointError(
        "copy or pickle: this model's experts are not in it but in moecast's arena; load the "
        "checkpoint that it was loaded from once more"
    )


def _refuse_state(module: nn.Module, prefix: str, _keep_vars: bool) -> NoReturn:
    raise CheckpointError(
        f"state_dict: the experts of {prefix.rstrip('.') or type(module).__name__} are not in the "
        "model but in moecast's arena; the other parameters are in named_parameters(), the experts "
        "in the checkpoint that it was loaded from"
    )


def _refuse_conversion(
    module: nn.Module, home: Tensor, convert: Callable[[Tensor], Tensor], *_: Any, **__: Any
) -> nn.Module:
    """Return the module where a conversion leaves it as it is.

    Args:
        home: an empty tensor of the model's dtype on its device.
        convert: what PyTorch would apply to every parameter.
    """
    target = convert(home)
    if target.dtype != home.dtype:
        raise CheckpointError(
            f"a loaded model stays in {home.dtype}, as its experts in moecast's arena do; pass "
            f"dtype= to load ({', '.join(DTYPES)})"
        )
    if target.device != home.device:
        raise CheckpointError(
            f"a loaded model stays on {home.device}, as its experts in moecast's arena do; pass "
            f"device= to load, such as device='{target.device}'"
        )
    return module


def guard_model(model: PreTrainedModel, layers: Iterable[MoeLayer]) -> None:
    """Make saving, copying and converting anything that contains experts an error."""
    model.save_pretrained = refuse_to_save
    home = torch.empty(0, dtype=model.dtype, device=model.device)
    for layer in layers:
        layer.experts.register_state_dict_pre_hook(_refuse_state)
        parts = layer.name.split(".")
        for end in range(len(parts) + 1):
            module = model.get_submodule(".".join(parts[:end]))
            vars(module)["_apply"] = partial(_refuse_conversion, module, home)
            vars(module)["__reduce_ex__"] = _refuse_to_copy
