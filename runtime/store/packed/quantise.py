"""Weights to integers with torchao (the `quantise` extra). Reading them back needs no library."""

import warnings

import torch
from torch import Tensor

from runtime.errors import StoreError
from runtime.store.packed.coding import Coding, Integers


def quantiser():
    """torchao's primitives, imported only by who quantises: four seconds.

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

    int8: symmetric, the largest of a group is 127. int4: HQQ, scale and zero chosen in steps
    so that few weights are far off (an l_0.7 norm).
    """
    ao = quantiser()
    dtype = weights_N.dtype
    groups = weights_N.view(-1, coding.group_size)
    if coding.bits == 8:
        block = (1, coding.group_size)
        scales, zeros = ao.choose_qparams_affine(
            groups, ao.MappingType.SYMMETRIC, block, torch.int8, -127, 127, scale_dtype=dtype
        )
        values = ao.quantize_affine(groups, block, scales, zeros, torch.int8, -127, 127)
        return Integers(values.view(-1), scales.view(-1), None)
    values, scales, zeros, _ = ao._choose_qparams_and_quantize_affine_hqq(
        groups,
        nbits=4,
        group_size=coding.group_size,
        compute_dtype=dtype,
        device="cpu",
        raw_output=True,
    )
    return Integers(values.view(-1), scales.view(-1), zeros.view(-1))
