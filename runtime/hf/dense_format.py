"""Linear layers outside of the experts, multiplied by ggml's kernels, and embeddings in rows.

Those of a GGUF file are as the file has them; linear layers of other models are rounded
(`model.dense_format`).

At batch size 1 a token reads every dense weight once. Of a model whose experts are in 4 bits, the
attention's projections and the output layer in bfloat16 are most of what is read: two thirds of
the time per token at Qwen3-30B-A3B's sizes. Routers keep their dtype, and embeddings are not
rounded, so that the choice of experts depends on rounding no more than it must. A file's embeddings
are decoded row by row, with the same bits: in bfloat16 those of Qwen3-30B-A3B take 593 MiB, in
4 bits 167.

Shape suffixes: N rows (outputs, or words), K columns (inputs, or the hidden size).
"""

from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

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


class QuantisedRows(nn.Module):
    """A matrix `[N, K]` of quantised rows.

    Args:
        weight: The matrix in the dtype that it stands for; maybe on the meta device.
        kind: A GGUF type that its rows divide into.
        rows: uint8.
    """

    def __init__(self, weight: Tensor, kind: str, rows: Tensor):
        super().__init__()
        self.num_rows, self.num_columns = weight.shape
        self.dtype, self.kind = weight.dtype, kind
        self.register_buffer("rows", rows, persistent=False)

    def fill(self, rows: Tensor) -> None:
        """Takes the rows, after the model was loaded."""
        self.rows = rows

    @property
    def weight(self) -> Tensor:
        """The matrix in its dtype, decoded for modules that look at it."""
        return self._decode(self.rows)

    def _decode(self, rows: Tensor) -> Tensor:
        return decode_rows(self.kind, rows).view(-1, self.num_columns).to(self.dtype)


class QuantisedEmbedding(QuantisedRows):
    """Embeddings whose rows are decoded when they are looked up."""

    def fill(self, rows: Tensor) -> None:
        """Takes the rows, after the model was loaded."""
        super().fill(rows)
        # A model's dtype is that of its first parameter, here as before.
        self.of_dtype = nn.Parameter(torch.empty(0, dtype=self.dtype), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns `F.embedding(ids, weight)`, `[..., K]` of ids `[...]`, with the same bits.

        Raises:
            IndexError: an id is negative or beyond the last word.
        """
        found = self.rows.view(self.num_rows, -1).index_select(0, ids.flatten())
        return self._decode(found).view(*ids.shape, self.num_columns)


class QuantisedLinear(QuantisedRows):
    """A linear layer whose rows are quantised; computed in float32 with quantised activations.

    Args:
        linear: The layer in its own dtype; its bias is taken over.
        kind: A GGUF type that its rows divide into.
        rows: uint8; by default the layer's weights, rounded.
    """

    def __init__(self, linear: nn.Linear, kind: str, rows: Tensor | None = None):
        weight = linear.weight.detach()
        super().__init__(weight, kind, encode_rows(kind, weight) if rows is None else rows)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._matrix = RowMatrix([RowsPart(kind, 0, self.out_features)], self.in_features)

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
    """Put a model's quantised rows one after another, in huge pages; tied ones stay tied.

    A product of one token took an eighth less time.
    """
    sharing: dict[int, list[QuantisedRows]] = {}
    for module in model.modules():
        if isinstance(module, QuantisedRows):
            sharing.setdefault(module.rows.data_ptr(), []).append(module)
    if not sharing:
        return
    sizes = [align(len(some[0].rows)) for some in sharing.values()]
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    use_huge_pages(memory)
    for some, place in zip(sharing.values(), memory.split(sizes), strict=True):
        rows = place[: len(some[0].rows)].copy_(some[0].rows)
        for module in some:
            module.rows = rows


FileRows = list[tuple[QuantisedRows, Tensor]]
"""Modules, and their rows as a file has them."""


@contextmanager
def keep_file_types(
    model: PreTrainedModel,
    tensors: AbstractContextManager[dict[str, StreamedTensor]],
    kept: FileRows,
) -> Iterator[dict[str, StreamedTensor]]:
    """Keep linear layers and embeddings of a model on the meta device as a GGUF file has them.

    Those that ggml multiplies leave the tensors that Transformers will load. It makes buffers anew,
    so that they get their rows afterwards.

    Args:
        kept: gets the modules.
    """
    with tensors as streamed:
        names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
        tied, embedding = model.all_tied_weights_keys, model.get_input_embeddings()
        read: dict[str, tuple[str, Tensor] | None] = {}
        for parent, child, module in (
            *find_linears(model, find_moe_layers(model)),
            *_find_children(model, nn.Embedding, {id(embedding)}),
        ):
            name = names[id(module)]
            source = tied.get(name, name)
            if source not in streamed or len(module.weight) < LEAST_ROWS:
                continue
            if source not in read:
                read[source] = streamed[source].read_stored()
            if (stored := read[source]) is None:
                continue
            kind, rows = stored
            if isinstance(module, nn.Linear):
                own: QuantisedRows = QuantisedLinear(module, kind, rows[:0])
            else:
                own = QuantisedEmbedding(module.weight, kind, rows[:0])
            kept.append((own, rows))
            setattr(parent, child, own)
            if name == source:
                del streamed[name]
            else:
                del tied[name]
        yield streamed


def fill_last(kept: FileRows) -> None:
    """Give the last module its rows; only the module has them afterwards."""
    module, rows = kept.pop()
    module.fill(rows)


M = TypeVar("M", bound=nn.Module)


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
    within = {id(part) for stack in stacks for part in stack.modules()} - kept
    yield from _find_children(model, nn.Linear, within | {id(model.get_output_embeddings())})


def _find_children(
    model: nn.Module, kind: type[M], within: Container[int]
) -> Iterator[tuple[nn.Module, str, M]]:
    """Yield the parents, the attributes and the modules of exactly this class with these ids."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is kind and id(child) in within
    ]
    yield from found
