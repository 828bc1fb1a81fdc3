"""Dense weights of layers in memory or outside: what their transfers take, and moving them."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from runtime.accelerator import open_accelerator
from runtime.config import StoreConfig
from runtime.hf.dense_stream import DensePart, DenseStream, find_dense_layers
from runtime.profiling.bandwidth import seconds, trimmed_mean
from runtime.store.dense_source import DenseCodes, DenseStore, read_extents
from runtime.store.files import FileReader
from runtime.store.packed.coding import HQQ, Coding, decode, encode, quantise_half_quadratic

READS = 7
ATTENTION_CODING = Coding(HQQ, group_size=64, meta_group_size=128)
"""Klotski's own numbers."""


def open_dense_store(model: PreTrainedModel, config: StoreConfig) -> DenseStore:
    """Return the store of a served model's dense weights."""
    accelerator = open_accelerator(model.device)
    files = FileReader(page_cache=config.page_cache)
    handle = model.moecast
    return DenseStore(handle.folder, files, accelerator=accelerator, codes=handle.dense_codes)


@torch.no_grad()
def quantise_attention(model: PreTrainedModel) -> None:
    """Round the matrices of attention to what HQQ codes decode to (Klotski, section 7).

    "We opt to preset that quantize both expert and attention tensors to 4 bits, using a group size
    of 64 and a zero scale group size of 128." `model.moecast.dense_codes` keeps the codes, which
    are then read in place of the weights. Matrices whose size is no multiple of the group size
    stay as they are, as do vectors.
    """
    handle = model.moecast
    codes: dict[str, Tensor] = {}
    for layer in find_dense_layers(model, handle.layers):
        parents = [handle.layers[number].parent for number in layer.layers]
        siblings = {id(weight) for parent in parents for weight in parent.parameters()}
        for name, parameter in layer.attention.parameters.items():
            is_matrix = parameter.ndim == 2 and parameter.numel() % ATTENTION_CODING.group_size == 0
            if not is_matrix or id(parameter) in siblings or not parameter.is_floating_point():
                continue
            flat = parameter.data.view(-1)
            size = ATTENTION_CODING.num_bytes(len(flat), flat.dtype)
            codes[name] = torch.zeros(size, dtype=torch.uint8, device=flat.device)
            integers = quantise_half_quadratic(ATTENTION_CODING, flat)
            encode(ATTENTION_CODING, integers, codes[name])
            decode(ATTENTION_CODING, codes[name], flat)
    handle.dense_codes = DenseCodes(ATTENTION_CODING, codes)


def measure_dense_transfers(
    model: PreTrainedModel, config: StoreConfig, *, with_gates: bool
) -> tuple[float, float]:
    """Time reading one layer's attention weights and its router's, in seconds.

    The middle layer is read alone, from where `DenseStream` would read it.

    Args:
        model: a served model, its dense weights in memory.
        config: how files are read.
        with_gates: routers are read on their own.

    Raises:
        TransferError: the weights cannot be read.
    """
    handle = model.moecast
    layers = find_dense_layers(model, handle.layers, with_gates=with_gates)
    middle = layers[len(layers) // 2]
    store = open_dense_store(model, config)

    def time_part(part: DensePart) -> float:
        tensors = {name: parameter.data for name, parameter in part.parameters.items()}
        extents = store.place_all(tensors)
        buffer = torch.empty(part.num_bytes, dtype=torch.uint8, device=model.device)
        return trimmed_mean([seconds(lambda: read_extents(extents, buffer)) for _ in range(READS)])

    try:
        return time_part(middle.attention), sum(time_part(gate) for gate in middle.gates)
    finally:
        store.close()


def stream_dense_weights(
    model: PreTrainedModel, config: StoreConfig, *, with_gates: bool
) -> DenseStream:
    """Move the layers' dense weights out of memory; `model.moecast.dense_stream` is the stream.

    Raises:
        TransferError: the weights cannot be written or read.
    """
    handle = model.moecast
    layers = find_dense_layers(model, handle.layers, with_gates=with_gates)
    handle.dense_stream = DenseStream(layers, open_dense_store(model, config), model.device)
    return handle.dense_stream
