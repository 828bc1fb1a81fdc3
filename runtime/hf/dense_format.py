"""Linear layers outside of the experts, multiplied as integers (`model.dense_format`).

At batch size 1 a token reads every dense weight once. Of a model whose experts are in 4 bits, the
attention's projections and the output layer in bfloat16 are most of what is read: two thirds of
the time per token at Qwen3-30B-A3B's sizes. Routers and embeddings keep their dtype, so that the
choice of experts depends on rounding no more than it must.

Shape suffixes: N rows (outputs), K columns (inputs).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from predictors.errors import MoecastError
from runtime.config import DenseFormat
from runtime.hf.layers import MoeLayer
from runtime.store.packed.blocks import ROW_STEP, fits, native_block, to_blocks
from runtime.store.packed.coding import Coding
from runtime.store.packed.kernel_choice import COLUMN_STEP, has_kernel
from runtime.store.packed.matrix import Int4Rows, Int8Rows
from runtime.store.packed.quantise import quantise

GROUP_SIZE = 32
"""Weights of int4 that share a scale and an offset."""
STEP = 1 << 22
"""Weights that are quantised at once: 16 MiB in float32."""


class QuantisedLinear(nn.Module):
    """A linear layer whose weights are integers; computed in bfloat16.

    Args:
        linear: The layer in its own dtype; its bias is taken over.
        bits: 8 or 4.
    """

    def __init__(self, linear: nn.Linear, bits: int):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.bias = linear.bias
        integers, scales = quantise_rows(linear.weight.detach(), bits)
        self.register_buffer("integers", integers, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @property
    def rows(self) -> Int4Rows | Int8Rows:
        if self.integers.dtype is torch.int8:
            return Int8Rows(self.integers, self.scales)
        return Int4Rows(self.integers, self.scales, GROUP_SIZE)

    @property
    def weight(self) -> Tensor:
        """The weights `[N, K]` in the model's dtype, decoded for modules that look at them."""
        unit_KK = torch.eye(self.in_features, dtype=torch.bfloat16, device=self.integers.device)
        return self.rows.multiply(unit_KK).t().to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `F.linear(x, weight, bias)`, `[..., N]` of `x` `[..., K]`, in its dtype."""
        x_TK = x.reshape(-1, self.in_features).bfloat16().contiguous()
        y = self.rows.multiply(x_TK).view(*x.shape[:-1], self.out_features).to(x.dtype)
        return y if self.bias is None else y + self.bias


def quantise_rows(weight_NK: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns integers and scales as `Int8Rows` and `Int4Rows` have them."""
    num_rows, num_columns = weight_NK.shape
    block = native_block()
    assert block is not None
    coding = make_coding(bits, num_columns)
    step = max(1, STEP // (num_columns * block)) * block
    integers, scales = [], []
    for rows in weight_NK.split(step):
        found = quantise(coding, rows.bfloat16().reshape(-1))
        if bits == 8:
            integers.append(found.values.view(-1, num_columns))
            scales.append(found.scales)
            continue
        assert found.zeros is not None
        values = found.values.view(-1, num_columns)
        integers.append(to_blocks(values, block).view(-1, num_columns // 2))
        pairs = torch.stack([found.scales, found.zeros], dim=-1)
        scales.append(pairs.view(len(rows), -1, 2).transpose(0, 1))
    if bits == 8:
        return torch.cat(integers), torch.cat(scales)
    return torch.cat(integers), torch.cat(scales, dim=1).contiguous()


def make_coding(bits: int, num_columns: int) -> Coding:
    if bits == 8:
        return Coding(8, num_columns)
    return Coding(4, GROUP_SIZE, block=native_block() or 0)


@torch.no_grad()
def apply_dense_format(
    model: PreTrainedModel, layers: Sequence[MoeLayer], wanted: DenseFormat
) -> None:
    """Replace linear layers by ones that multiply integers.

    They are those of the decoder's blocks, without routers, and the output layer. A layer whose
    shape the kernel does not take stays as it is.

    Raises:
        MoecastError: the model is on a device, or this processor has no kernel.
    """
    if wanted is DenseFormat.OWN:
        return
    name = f"model.dense_format={wanted.value}"
    if model.device.type != "cpu":
        raise MoecastError(f"{name}: dense weights are multiplied as integers on a CPU only")
    bits = 8 if wanted is DenseFormat.INT8 else 4
    replaced: dict[int, QuantisedLinear] = {}
    for parent, child, linear in find_linears(model, layers):
        if not is_suitable(linear, bits):
            continue
        if not has_kernel(make_coding(bits, linear.in_features), linear.in_features):
            raise MoecastError(
                f"{name}: PyTorch has no fast kernel for it on this processor "
                f"({torch.backends.cpu.get_cpu_capability()}); leave the option out"
            )
        if id(linear) not in replaced:
            replaced[id(linear)] = QuantisedLinear(linear, bits)
        setattr(parent, child, replaced[id(linear)])


def is_suitable(linear: nn.Linear, bits: int) -> bool:
    num_rows, num_columns = linear.weight.shape
    if bits == 4:
        return fits(num_rows, num_columns, GROUP_SIZE)
    return num_rows >= ROW_STEP and num_columns % COLUMN_STEP == 0


def find_linears(
    model: PreTrainedModel, layers: Sequence[MoeLayer]
) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the modules that have linear layers to quantise, the attribute, and the layer."""
    blocks = {id(layer.block) for layer in layers}
    kept = {id(part) for layer in layers for part in layer.router.modules()}
    kept |= {id(part) for layer in layers for part in layer.experts.modules()}
    stacks = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and any(id(block) in blocks for block in module)
    ]
    output = model.get_output_embeddings()
    modules = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and id(child) not in kept
    ]
    within = {id(part) for stack in stacks for part in stack.modules()} | {id(output)}
    yield from (linear for linear in modules if id(linear[2]) in within)
