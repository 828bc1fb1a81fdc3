"""The experts function that replaces Transformers' own.

Shape suffixes: T tokens, D hidden size, K top_k, E experts, N tokens of one expert.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from enum import StrEnum
from itertools import chain
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from runtime.accelerator import host_copy, send
from runtime.hf.linear import SINGLE_ROWS, linear, multiply_rows
from runtime.hf.quantised_experts import compute_quantised
from runtime.store.ggml.matrix import ExpertWeights, QuantisedExpert

IMPLEMENTATION = "moecast"

separate_rows: ContextVar[int] = ContextVar("separate_rows", default=0)
"""Number of rows of which each is computed as if it were alone; 0: rows are tokens of one batch.
Rows beyond are spare, and get zeros."""

Ready = Callable[[list[int]], Iterator[Mapping[int, ExpertWeights]]]
"""`(experts of the step) -> parameters by expert`, at a time those that are ready."""

EXPERTS, TOKENS, TOP_K, WIDTH, HIDDEN = 4, 24, 3, 4, 8
"""The tiny bank, on which a module's own loop and ours are compared bit by bit: every expert gets
several tokens, every token several experts."""


DIVIDED = 32_768
"""Numbers from which on PyTorch divides an elementwise operation among threads."""
EVEN = 128
"""PyTorch computes whole vectors with one function and the rest of a row with another. Rows, and
halves of a gate's rows, of a multiple of this have no rest, alone or together."""


class AccumulationDtype(StrEnum):
    """Dtype of the sum over a token's experts; a few models compute differently."""

    HIDDEN = "of the hidden states"
    WEIGHTS = "of the routing weights"
    FLOAT32 = "float32"

    def dtype(self, hidden: Tensor, weights: Tensor) -> torch.dtype:
        """Return the dtype to accumulate these two tensors' product in."""
        if self is AccumulationDtype.HIDDEN:
            return hidden.dtype
        return weights.dtype if self is AccumulationDtype.WEIGHTS else torch.float32


def run_own_loop(module: nn.Module, *args: Tensor) -> Tensor:
    """The experts class's own forward, under Transformers' decorator."""
    return type(module).forward.__wrapped__(module, *args)


def make_tiny_twin(
    module: nn.Module, dtype: torch.dtype
) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A module of the same class with four small random experts, and these one by one."""
    generator = torch.Generator().manual_seed(0)
    up, up_width = ("gate_up_proj", 2 * WIDTH) if module.has_gate else ("up_proj", WIDTH)
    shapes: dict[str, tuple[int, ...]] = {up: (up_width, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    if module.is_transposed:
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    if module.has_bias:
        shapes |= {f"{up}_bias": (up_width,), "down_proj_bias": (HIDDEN,)}
    fused = {
        name: torch.randn((EXPERTS, *shape), generator=generator).to(dtype)
        for name, shape in shapes.items()
    }
    twin = copy.copy(module)
    twin._parameters = {}
    twin._modules = dict(module._modules)
    if module.has_post_expert_norm:
        twin._modules["post_expert_norm"] = nn.Identity()
    for name, value in {**fused, "num_experts": EXPERTS}.items():
        setattr(twin, name, value)
    return twin, [{name: value[e] for name, value in fused.items()} for e in range(EXPERTS)]


def make_inputs(dtype: torch.dtype, weights_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`(hidden_TD, experts_TK, weights_TK)`; the weights add up to 1 for no token."""
    generator = torch.Generator().manual_seed(1)
    hidden_TD = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    experts_TK = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K]
    weights_TK = torch.rand(TOKENS, TOP_K, generator=generator).to(weights_dtype)
    return hidden_TD, experts_TK, weights_TK


_ACCUMULATION: WeakKeyDictionary[type[nn.Module], AccumulationDtype | None] = WeakKeyDictionary()
"""Results by class: a test takes milliseconds, and all layers of a model have one class."""


def compute_expert(module: nn.Module, weights: ExpertWeights, hidden_ND: Tensor) -> Tensor:
    """Return one expert's output for its tokens, `(N, D)`, with the eager loop's operations.

    Tokens are copied to the expert's device, and the output back; between two devices of one kind
    no bit changes.
    """
    home = hidden_ND.device
    if isinstance(weights, QuantisedExpert):
        ids_N1 = torch.zeros(len(hidden_ND), 1, dtype=torch.long)
        inputs = (hidden_ND.to("cpu"), ids_N1, torch.ones(ids_N1.shape))
        return compute_quantised(module, [{0: weights}], *inputs).to(home)
    there = next(iter(weights.values())).device
    if there != home:
        hidden_ND = hidden_ND.to(there)

    def project(x: Tensor, name: str) -> Tensor:
        weight = weights[name]
        x = x @ weight if module.is_transposed else linear(x, weight)
        return x + weights[f"{name}_bias"] if module.has_bias else x

    if module.has_gate:
        hidden = module._apply_gate(project(hidden_ND, "gate_up_proj"))
    else:
        hidden = module.act_fn(project(hidden_ND, "up_proj"))
    output = project(hidden, "down_proj")
    if there != home:
        output = output.to(home)
    return module.post_expert_norm(output) if module.has_post_expert_norm else output


def compute_experts(
    module: nn.Module,
    ready: Ready,
    how: AccumulationDtype,
    hidden_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """Compute experts as they become ready, and add up their outputs in ascending order.

    The order of summation changes the last bits. With the eager loop's order and terms the result
    is bitwise the eager loop's, whatever was cached or late. Ids beyond the last expert mean "skip"
    (expert parallelism, zero experts), as in eager.
    """
    num_experts, ids_TK = module.num_experts, host_copy(experts_TK)
    chosen_TK = ids_TK.tolist()
    wanted = sorted({e for chosen in chosen_TK for e in chosen if e < num_experts})
    batches, is_quantised = _look_ahead(ready(wanted))
    # On a device only those are that are computed in host memory.
    if is_quantised and hidden_TD.device.type == "cpu":
        return compute_quantised(module, batches, hidden_TD, experts_TK, weights_TK)
    if len(chosen_TK) == 1:
        weight_of = dict(zip(chosen_TK[0], weights_TK.split(1, dim=1), strict=True))
        if len(wanted) == sum(e < num_experts for e in chosen_TK[0]):
            return _compute_one_token(module, batches, how, hidden_TD, wanted, weight_of)
    chosen_by = _group_by_expert(ids_TK, weights_TK, num_experts)
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    for expert, weights in _one_by_one(batches):
        token_N, weight_N1 = chosen_by[expert]
        output_ND = compute_expert(module, weights, hidden_TD[token_N])
        parts[expert] = token_N, output_ND * weight_N1
    final_TD = torch.zeros_like(hidden_TD, dtype=how.dtype(hidden_TD, weights_TK))
    for expert in wanted:
        token_N, output_ND = parts[expert]
        final_TD.index_add_(0, token_N, output_ND.to(final_TD.dtype))
    return final_TD.to(hidden_TD.dtype)


def _look_ahead(
    batches: Iterator[Mapping[int, ExpertWeights]],
) -> tuple[Iterator[Mapping[int, ExpertWeights]], bool]:
    """Return the batches, and whether the experts are multiplied as they are stored."""
    first = next(batches, {})
    return chain([first], batches), isinstance(next(iter(first.values()), None), QuantisedExpert)


def _one_by_one(
    batches: Iterator[Mapping[int, ExpertWeights]],
) -> Iterator[tuple[int, ExpertWeights]]:
    for batch in batches:
        yield from batch.items()


def _group_by_expert(
    ids_TK: Tensor, weights_TK: Tensor, num_experts: int
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return each chosen expert's tokens `(N,)` and weights `(N, 1)`, ascending by expert.

    Ids are in host memory; what is returned is where the weights are. Tokens are in the order in
    which eager lists them, choice by choice. One sort for all experts takes a tenth of the time of
    small experts less than a search for each.
    """
    sorted_N, order_N = ids_TK.t().flatten().sort(stable=True)
    experts, counts = torch.unique_consecutive(sorted_N, return_counts=True)
    order_N = send(order_N, weights_TK.device)
    token_N = order_N % len(ids_TK)
    weight_N1 = weights_TK[token_N, order_N // len(ids_TK), None]
    groups, start = {}, 0
    for expert, count in zip(experts.tolist(), counts.tolist(), strict=True):
        part = slice(start, start + count)
        if expert < num_experts:
            groups[expert] = token_N[part], weight_N1[part]
        start += count
    return groups


def _compute_one_token(
    module: nn.Module,
    batches: Iterator[Mapping[int, ExpertWeights]],
    how: AccumulationDtype,
    hidden_TD: Tensor,
    wanted: list[int],
    weight_of: Mapping[int, Tensor],
) -> Tensor:
    """Compute one token with distinct experts, as in decoding, without sorting or gathering.

    That saves a sixth of the time of small experts.

    Args:
        wanted: the experts, ascending.
        weight_of: weight `(1, 1)` of each.
    """
    # A copy, as gathering makes one: where a tensor is aligned may change the last bits.
    hidden_ND = hidden_TD.clone(memory_format=torch.contiguous_format)
    parts: dict[int, Tensor] = {}
    for batch in batches:
        outputs = None
        if hidden_ND.dtype in SINGLE_ROWS:
            outputs = _compute_together(module, batch, hidden_ND)
        if outputs is None:
            outputs = [compute_expert(module, weights, hidden_ND) for weights in batch.values()]
        for expert, output in zip(batch, outputs, strict=True):
            parts[expert] = output * weight_of[expert]
    first = next(iter(weight_of.values()), hidden_TD)
    final_TD = torch.zeros_like(hidden_TD, dtype=how.dtype(hidden_TD, first))
    for expert in wanted:
        final_TD += parts[expert].to(final_TD.dtype)
    return final_TD.to(hidden_TD.dtype)


def _compute_together(
    module: nn.Module, batch: Mapping[int, ExpertWeights], hidden_1D: Tensor
) -> Sequence[Tensor] | None:
    """Compute the experts that are ready for one token, `(1, D)` each, with the bits of each alone.

    Returns:
        None: they have to be computed one by one.
    """
    if module.is_transposed or module.has_bias or module.has_post_expert_norm:
        return None
    experts = [weights for weights in batch.values() if not isinstance(weights, QuantisedExpert)]
    if not experts or len(experts) < len(batch):
        return None
    up = "gate_up_proj" if module.has_gate else "up_proj"
    inner_EF = multiply_rows(hidden_1D, [weights[up] for weights in experts])
    if inner_EF is None:
        return None
    activate = module._apply_gate if module.has_gate else module.act_fn
    if inner_EF.numel() > DIVIDED or inner_EF.shape[1] % EVEN:
        inner_EF = torch.cat([activate(row_1F) for row_1F in inner_EF.split(1)])
    else:
        inner_EF = activate(inner_EF)
    output_ED = multiply_rows(inner_EF, [weights["down_proj"] for weights in experts])
    return None if output_ED is None else output_ED.split(1)


def compute_separate_rows(
    module: nn.Module,
    ready: Ready,
    how: AccumulationDtype,
    hidden_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """Compute the rows of a block, each bitwise as `compute_experts` computes it alone.

    An expert is requested once for all rows, and multiplied with each of its rows. Outputs are
    weighted and added up for all rows together, which changes no bit.
    """
    num_rows, (num_spare, top_k) = separate_rows.get(), experts_TK.shape
    num_spare -= num_rows
    sorted_RK, order_RK = experts_TK[:num_rows].sort(dim=1)
    weights_RK1 = weights_TK[:num_rows].gather(1, order_RK).unsqueeze(-1)
    # Copies, as gathering makes them: where a tensor is aligned may change the last bits.
    rows = [hidden_TD[row : row + 1].clone() for row in range(num_rows)]
    pairs: dict[int, list[int]] = {}
    sorted_ids = sorted_RK if sorted_RK.is_cpu else host_copy(experts_TK)[:num_rows].sort(dim=1)[0]
    for pair, expert in enumerate(sorted_ids.flatten().tolist()):
        if expert < module.num_experts:
            pairs.setdefault(expert, []).append(pair)
    outputs = [torch.zeros_like(rows[0])] * sorted_RK.numel()
    batches, is_quantised = _look_ahead(ready(sorted(pairs)))
    if is_quantised:
        own = (tensor[:num_rows] for tensor in (hidden_TD, experts_TK, weights_TK))
        return F.pad(compute_quantised(module, batches, *own), (0, 0, 0, num_spare))
    for expert, weights in _one_by_one(batches):
        for pair in pairs[expert]:
            outputs[pair] = compute_expert(module, weights, rows[pair // top_k])
    weighted_RKD = torch.cat(outputs).view(num_rows, top_k, -1) * weights_RK1
    dtype = how.dtype(hidden_TD, weights_TK)
    final_RD = torch.zeros_like(hidden_TD[:num_rows], dtype=dtype)
    for output_RD in weighted_RKD.to(dtype).unbind(1):
        final_RD += output_RD
    return F.pad(final_RD.to(hidden_TD.dtype), (0, 0, 0, num_spare))


def multiplies_rows(module: nn.Module) -> bool:
    """Returns whether `compute_expert` multiplies by the rows of an expert's matrices.

    Then experts may be `QuantisedExpert`; others get tensors.
    """
    return runs_our_loop(module) and not module.is_transposed


def runs_our_loop(module: nn.Module) -> bool:
    """Returns whether `compute_experts` computes the module's experts, not the module itself."""
    return hasattr(module, "has_gate") and find_accumulation(module) is not None


def find_accumulation(module: nn.Module) -> AccumulationDtype | None:
    """Return the dtype in which the module's own loop accumulates; None if its loop must run."""
    cls = type(module)
    if cls not in _ACCUMULATION:
        _ACCUMULATION[cls] = _test_accumulation(module)
    return _ACCUMULATION[cls]


@torch.no_grad()
def _test_accumulation(module: nn.Module) -> AccumulationDtype | None:
    twin, experts = make_tiny_twin(module, torch.bfloat16)

    def ready(wanted: list[int]) -> Iterator[dict[int, ExpertWeights]]:
        return iter([{expert: experts[expert] for expert in wanted}])

    cases = [make_inputs(torch.bfloat16, dtype) for dtype in (torch.bfloat16, torch.float32)]
    try:
        expected = [run_own_loop(twin, *case) for case in cases]
    except (RuntimeError, AttributeError):
        return None  # It needs more than the usual parameters.
    for how in AccumulationDtype:
        outputs = [compute_experts(twin, ready, how, *case) for case in cases]
        if all(map(torch.equal, outputs, expected)):
            return how
    return None


def moecast_experts(
    module: nn.Module, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Compute an experts module that its adapter has attached; Transformers calls this."""
    if module.moecast_grouped is not None:
        output: Tensor = module.moecast_grouped.compute(module, hidden_TD, experts_TK, weights_TK)
        return output
    how: AccumulationDtype | None = module.moecast_sum
    if how is None:
        # Its parameters are placeholders that fetch the expert whose index they are given.
        return run_own_loop(module, hidden_TD, experts_TK, weights_TK)
    compute = compute_separate_rows if separate_rows.get() else compute_experts
    return compute(module, module.moecast_ready, how, hidden_TD, experts_TK, weights_TK)


def register() -> None:
    """Makes the function known to Transformers; registering again changes nothing."""
    ExpertsInterface.register(IMPLEMENTATION, moecast_experts)
