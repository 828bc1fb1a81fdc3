"""A family's summation of its experts' outputs is recognised by the bits, not by its name."""

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen2MoeConfig
from transformers.integrations.moe import use_experts_implementation
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts

from runtime.hf import experts as hf_experts
from runtime.hf.experts import AccumulationDtype, find_accumulation


def experts_that_add(sum_dtype, change=lambda _module, output: output):
    """An experts module whose loop adds in `sum_dtype(hidden, weights)`; `change`: what each
    expert's output becomes, of which ours knows nothing."""

    @use_experts_implementation
    class Experts(Qwen2MoeExperts):
        def forward(self, hidden, index, weights):
            out = torch.zeros_like(hidden, dtype=sum_dtype(hidden, weights))
            for e in range(self.num_experts):
                token, slot = torch.where(index == e)
                x = self._apply_gate(F.linear(hidden[token], self.gate_up_proj[e]))
                x = F.linear(x, self.down_proj[e]) * weights[token, slot, None]
                out.index_add_(0, token, change(self, x).to(out.dtype))
            return out.to(hidden.dtype)

    return Experts(Qwen2MoeConfig(num_experts=4, hidden_size=8, moe_intermediate_size=4))


SUMS = [
    (AccumulationDtype.HIDDEN, lambda hidden, _: hidden.dtype),
    (AccumulationDtype.WEIGHTS, lambda _, weights: weights.dtype),
    (AccumulationDtype.FLOAT32, lambda *_: torch.float32),
]


@pytest.mark.parametrize(("how", "dtype"), SUMS)
def test_find_accumulation__finds_the_precision_of_the_sum(how, dtype):
    assert find_accumulation(experts_that_add(dtype)) is how


@pytest.mark.parametrize("change", [lambda _, x: x * 1.5, lambda m, x: x * m.what_no_twin_has])
def test_find_accumulation__is_none_for_unusual_loops(change):
    assert find_accumulation(experts_that_add(lambda hidden, _: hidden.dtype, change)) is None


def test_find_accumulation__leaves_the_module_as_it_was():
    with torch.device("meta"):
        module = Qwen2MoeExperts(Qwen2MoeConfig(num_experts=8))
    before = {name: id(value) for name, value in module._parameters.items()}
    assert find_accumulation(module) is AccumulationDtype.HIDDEN
    assert {name: id(value) for name, value in module._parameters.items()} == before
    assert module.num_experts == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", [[2, 0, 3], [3, 2, 1], [1, 4, 0], [4, 4, 4], [2, 2, 1]], ids=str)
def test_computed__one_token_has_the_loop_s_bits(dtype, chosen):
    # 4 experts, so 4 means that the token skips one; twice the same: its weights add up.
    twin, experts = hf_experts.make_tiny_twin(Qwen2MoeExperts(Qwen2MoeConfig(num_experts=8)), dtype)
    hidden, _, weights = hf_experts.make_inputs(dtype, torch.float32)
    index = torch.tensor([chosen])

    def ready(wanted):
        return iter([{e: experts[e]} for e in reversed(wanted)])

    for token in range(8):
        # Strided and at odd places in memory, as a caller's slice may be.
        one = hidden.repeat(1, 2)[token : token + 1, 1:9]
        given = one, index, weights[token : token + 1]
        expected = torch.zeros(1, 8, dtype=dtype)
        for e in range(4):
            rows, slots = torch.where(index == e)
            gate, up = F.linear(one[rows], experts[e]["gate_up_proj"]).chunk(2, dim=-1)
            output = F.linear(F.silu(gate) * up, experts[e]["down_proj"])
            expected.index_add_(0, rows, (output * given[2][rows, slots, None]).to(dtype))
        found = hf_experts.compute_experts(twin, ready, AccumulationDtype.HIDDEN, *given)
        assert torch.equal(found, expected)
