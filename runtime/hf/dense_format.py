"""Linear layers outside of the experts, multiplied by ggml's kernels.

Those of a GGUF file are as the file has them; others are rounded (`model.dense_format`).

At batch size 1 a token reads every dense weight once. Of a model whose experts are in 4 bits, the
attention's projections and the output layer in bfloat16 are most of what is read: two thirds of
the time per token at Qwen3-30B-A3B's sizes. Routers and embeddings keep their dtype, so that the
choice of experts depends on rounding no more than it must.

Shape suffixes: N rows (outputs), K columns (inputs).
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from predictors.errors import MoecastError
from runtime.config import DenseFormat
from runtime.hf.gguf import StreamedTensor
from runtime.hf.layers import MoeLayer, find_moe_layers
from runtime.store.files import align
from runtime.store.ggml.library import decode_rows, encode_rows, explain_missing, find_products
from runtime.store.ggml.matrix import RowMatrix, RowsPart
from runtime.store.layout import choose_kind, name_kind
from runtime.transfer.arena import use_huge_pages

LEAST_ROWS = 16
"""A layer of fewer rows, such as a gate, stays as it is."""


class QuantisedLinear(nn.Module):
    """A linear layer whose rows are quantised; computed in float32 with quantised activations.

    Args:
        linear: The layer in its own dtype; its bias is taken over.
        kind: A GGUF type that its rows divide into.
        rows: uint8; by default the layer's weights, rounded.
    """

    def __init__(self, linear: nn.Linear, kind: str, rows: Tensor | None = None):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype, self.kind = linear.weight.dtype, kind
        self.bias = linear.bias
        if rows is None:
            rows = encode_rows(kind, linear.weight.detach())
        self.register_buffer("rows", rows, persistent=False)
        self._matrix = RowMatrix([RowsPart(kind, 0, self.out_features)], self.in_features)

    @property
    def weight(self) -> Tensor:
        """The weights `[N, K]` in the model's dtype, decoded for modules that look at them."""
        return decode_rows(self.kind, self.rows).view(-1, self.in_features).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `F.linear(x, weight, bias)`, `[..., N]` of `x` `[..., K]`, in its dtype."""
        y = self._matrix.linear(self.rows, x.reshape(-1, self.in_features))
        y = y.view(*x.shape[:-1], self.out_features).to(x.dtype)
        return y if self.bias is None else y + self.bias


@torch.no_grad()
def apply_dense_format(
    model: PreTrainedModel, layers: Sequence[MoeLayer], wanted: DenseFormat
) -> None:
    """Replace linear layers by quantised ones.

    They are those of the decoder's blocks, without routers, and the output layer. A layer whose
    rows do not divide into blocks stays as it is.

    Raises:
        MoecastError: the model is on a device, or there are no kernels.
    """
    if wanted is DenseFormat.OWN:
        return
    name = f"model.dense_format={wanted.value}"
    if model.device.type != "cpu":
        raise MoecastError(f"{name}: quantised dense weights are multiplied on a CPU only")
    kind = name_kind(wanted.value)
    if find_products() is None:
        raise MoecastError(f"{name}: {explain_missing()}; leave the option out")
    replaced: dict[int, QuantisedLinear] = {}
    for parent, child, linear in find_linears(model, layers):
        own = choose_kind(kind, linear.in_features)
        if not own or linear.out_features < LEAST_ROWS:
            continue
        if id(linear) not in replaced:
            replaced[id(linear)] = QuantisedLinear(linear, own)
        setattr(parent, child, replaced[id(linear)])


def place_together(model: PreTrainedModel) -> None:
    """Put the rows of a model's quantised layers one after another, in huge pages.

    A product of one token took an eighth less time.
    """
    linears = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    if not linears:
        return
    sizes = [align(len(linear.rows)) for linear in linears]
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    use_huge_pages(memory)
    for linear, place in zip(linears, memory.split(sizes), strict=True):
        linear.rows = place[: len(linear.rows)].copy_(linear.rows)


FileRows = list[tuple[QuantisedLinear, Tensor]]
"""Linear layers, and their rows as a file has them."""


@contextmanager
def keep_file_types(
    model: PreTrainedModel,
    tensors: AbstractContextManager[dict[str, StreamedTensor]],
    kept: FileRows,
) -> Iterator[dict[str, StreamedTensor]]:
    """Keep the linear layers of a model on the meta device as a GGUF file has them.

    Those that ggml multiplies leave the tensors that Transformers will load. It makes buffers anew,
    so that they get their rows afterwards.

    Args:
        kept: gets the layers.
    """
    with tensors as streamed:
        names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
        output = model.get_output_embeddings()
        tied = output is not None and output.weight is model.get_input_embeddings().weight
        for parent, child, linear in find_linears(model, find_moe_layers(model)):
            source = streamed.get(names[id(linear)])
            if source is None or linear.out_features < LEAST_ROWS or (tied and linear is output):
                continue
            if (stored := source.read_stored()) is not None:
                kind, rows = stored
                kept.append((QuantisedLinear(linear, kind, rows[:0]), rows))
                setattr(parent, child, kept[-1][0])
                del streamed[names[id(linear)]]
        yield streamed


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
