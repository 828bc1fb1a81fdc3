"""Weights to integers with torchao (the `quantise` extra). Reading them back needs no library."""

import warnings

import torch
from torch import Tensor

from runtime.errors import StoreError
from runtime.store.packed.coding import Coding, Integers


def import_torchao():
    """The primitives of torchao, imported only by who quantises: four seconds.

    Raises:
        StoreError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.quantization import quant_primitives
    except ImportError as error:
        raise StoreError(
            "quantising needs torchao: pip install 'moecast[quantise]', or pack with quantise=none"
        ) from error
    return quant_primitives


def quantise(coding: Coding, weights_N: Tensor) -> Integers:
    """A part's weights, `(N,)` in their own dtype, as integers; groups follow one another.

    int8: symmetric, the largest of a group is 127. int4: from the smallest to the largest of a
    group, zero among the values, so that zeros stay zeros. HQQ's search for better scales, also in
    torchao, takes twenty times as long and won nothing that the reference model shows: 1.6 and 1.8
    thousandths of a nat lost.
    """
    ao = import_torchao()
    dtype, block = weights_N.dtype, (1, coding.group_size)
    if coding.bits == 8:
        mapping, kind, bounds = ao.MappingType.SYMMETRIC, torch.int8, (-127, 127)
    else:
        mapping, kind, bounds = ao.MappingType.ASYMMETRIC, torch.uint8, (0, 15)
    groups = weights_N.view(-1, coding.group_size)
    scales, zeros = ao.choose_qparams_affine(
        groups, mapping, block, kind, *bounds, scale_dtype=dtype
    )
    values = ao.quantize_affine(groups, block, scales, zeros, kind, *bounds)
    kept = zeros.view(-1).to(dtype) if coding.bits == 4 else None
    return Integers(values.view(-1), scales.view(-1), kept)
