"""Loads models through Transformers: stripped of their experts, or whole as the reference."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from predictors.spec import ModelSpec
from runtime.config import ModelConfig, PageCache
from runtime.hf import experts as experts_function
from runtime.hf.classes import find_model_class
from runtime.hf.layers import MoeLayer, find_moe_layers, find_top_k
from runtime.hf.strip import Banks, make_stripped_class
from runtime.store.checkpoint import CheckpointStore
from runtime.store.model_source import identity
from runtime.store.weight_plan import WeightPlan

ALIGNMENT = 64
"""Bytes. PyTorch aligns its own allocations on the CPU to it."""


@dataclass(frozen=True)
class StrippedModel:
    """A model without its experts, and where the checkpoint has them."""

    model: PreTrainedModel
    layers: list[MoeLayer]
    plans: list[dict[str, WeightPlan]]
    """Weight plans of each layer's experts, by parameter."""

    def open_store(self, *, page_cache: PageCache = PageCache.BYPASS) -> CheckpointStore:
        """Return a store that reads the experts from the checkpoint, in place."""
        return CheckpointStore(self.model, self.plans, page_cache=page_cache)

    def spec(self, folder: Path, config: ModelConfig) -> ModelSpec:
        """Return what predictors of this model must match."""
        plans = [plan for layer in self.plans for plan in layer.values()]
        return ModelSpec(
            **identity(folder, config),
            num_layers=len(self.layers),
            num_experts=max(plan.parameter.num_experts for plan in plans),
            top_k=find_top_k(self.model, self.layers),
            hidden_size=self.model.config.get_text_config().hidden_size,
            dtype=str(self.model.dtype).removeprefix("torch."),
        )


def load_stripped(folder: Path, dtype: str, device: torch.device | str = "cpu") -> StrippedModel:
    """Load a model without its experts: no byte of them is read.

    Raises:
        CheckpointError: no model class for it, no experts, or damaged files.
    """
    experts_function.register()
    cls, config = find_model_class(AutoConfig.from_pretrained(folder))
    indexed: dict[str, Banks] = {}
    stripped = make_stripped_class(cls, lambda banks: indexed.update(banks=banks))
    with progress_bars():
        model = stripped.from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            experts_implementation=experts_function.IMPLEMENTATION,
            local_files_only=True,
        )
    model.__class__ = cls
    model = unmap_weights(model, mapped=False).to(device).eval()
    layers = find_moe_layers(model)
    return StrippedModel(model, layers, [indexed["banks"][layer.name] for layer in layers])


def load_plain(folder: Path, *, dtype: torch.dtype | str) -> PreTrainedModel:
    """Load the whole model with Transformers' own eager experts: the reference for exactness."""
    cls, config = find_model_class(AutoConfig.from_pretrained(folder))
    with progress_bars():
        model = cls.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            experts_implementation="eager",
            local_files_only=True,
        )
    return unmap_weights(model).eval()


@contextmanager
def progress_bars() -> Iterator[None]:
    """Show Transformers' progress bars only where standard error is a terminal, not in logs."""
    is_enabled = logging.is_progress_bar_enabled()
    if is_enabled and not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_enabled:
            logging.enable_progress_bar()


@torch.no_grad()
def unmap_weights(model: PreTrainedModel, *, mapped: bool = True) -> PreTrainedModel:
    """Copy every parameter out of the file that it may be mapped from; returns the model.

    A mapped page that cannot be read kills the process, and kernels take another path on a mapped
    tensor's unaligned address, which changes the last bits of a result. Parameters that share
    memory still do afterwards.

    Args:
        mapped: False where no file was mapped: then only what is unaligned is copied.
    """
    copies: dict[int, Tensor] = {}
    for parameter in model.parameters():
        address = parameter.data_ptr()
        if address not in copies:
            # Nothing on a device is mapped, and a copy would double its memory.
            must_copy = parameter.device.type == "cpu" and (mapped or address % ALIGNMENT)
            copies[address] = parameter.data.clone() if must_copy else parameter.data
        parameter.data = copies[address]
    return model
