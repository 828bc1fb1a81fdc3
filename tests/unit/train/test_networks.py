"""The stack against networks computed one by one, and against plain torch modules."""

import numpy as np
import torch
from torch import nn

from tests.builders.traces import make_spec
from train import networks

SPEC = make_spec()


def test_normalise__makes_mean_zero_and_deviation_one() -> None:
    stack = networks.NetworkStack(1, SPEC, width=4)
    sample = torch.randn(1, 1_000, SPEC.hidden_size) * 5 - 2
    stack.normalise_by(sample)
    normal = (sample - stack.mean_ND[:, None]) * stack.scale_ND[:, None]
    torch.testing.assert_close(normal.mean(1), torch.zeros(1, 16), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.std(1), torch.ones(1, 16), atol=1e-5, rtol=0)


def test_chosen_loss__is_binary_cross_entropy_against_the_chosen_set() -> None:
    logits, chosen = torch.randn(2, 5, 8), torch.stack([torch.randperm(8)[:3] for _ in range(10)])
    chosen = chosen.reshape(2, 5, 3)
    wanted = torch.zeros(2, 5, 8).scatter(-1, chosen, 1.0)
    every = nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    torch.testing.assert_close(networks.chosen_loss(logits, chosen), every.sum(-1).mean(-1))


def test_listwise_loss__is_cross_entropy_against_the_chosen_set() -> None:
    logits, chosen = torch.randn(1, 5, 8), torch.tensor([[[0, 3]] * 5])
    shares = torch.zeros(5, 8)
    shares[:, [0, 3]] = 0.5
    expected = nn.functional.cross_entropy(logits[0], shares)
    torch.testing.assert_close(networks.listwise_loss(logits, chosen)[0], expected)


def test_top_k_hits__counts_as_numpy_does() -> None:
    logits, chosen = torch.randn(2, 6, 8), torch.randn(2, 6, 8).topk(2).indices
    best = np.argsort(-logits.numpy(), axis=-1)[..., :2]
    sets = [[{*best[n, b]} & {*chosen[n, b].tolist()} for b in range(6)] for n in range(2)]
    counted = [sum(map(len, found)) for found in sets]
    assert [one.tolist() for one in networks.top_k_hits(logits, chosen)] == [counted, [12, 12]]


def test_chosen__the_id_of_no_choice_is_left_out() -> None:
    """LongCat's zero experts: a token may choose fewer experts, or none."""
    logits, chosen = torch.randn(1, 2, 4, requires_grad=True), torch.tensor([[[1, 4], [4, 4]]])
    both = nn.functional.softplus(logits[0]).sum() - logits[0, 0, 1]
    torch.testing.assert_close(networks.chosen_loss(logits, chosen)[0], both / 2)
    # The first token has half a choice to learn from, the second none.
    first = -logits[0, 0].log_softmax(-1)[1] / 2
    torch.testing.assert_close(networks.listwise_loss(logits, chosen)[0], first / 2)
    networks.listwise_loss(logits, chosen).sum().backward()
    assert not logits.grad[0, 1].any()
    found = networks.top_k_hits(torch.tensor([[[0.0, 3.0, 2.0, 1.0]] * 2]), chosen)
    assert [one.tolist() for one in found] == [[1], [1]]


def test_stack__networks_learn_independently() -> None:
    """Also as the last one, whose weights the optimizer's vectors end in."""
    spec = make_spec(num_layers=4, num_experts=60, top_k=4, hidden_size=16)
    torch.manual_seed(0)
    large = networks.NetworkStack(8, spec, width=16)
    small = networks.NetworkStack(5, spec, width=16)
    with torch.no_grad():
        for name, value in small.named_parameters():
            value.copy_(large.get_parameter(name)[:5])
    hidden_NBD = torch.randn(8, 32, 16)
    chosen_NBK = torch.stack([torch.randperm(60)[:4] for _ in range(8 * 32)]).view(8, 32, 4)
    for stack in (large, small):
        optimizer = torch.optim.AdamW(stack.parameters(), lr=0.01, weight_decay=0.01, fused=True)
        number = len(stack.bias_in_NF)
        for _ in range(60):
            optimizer.zero_grad()
            networks.chosen_loss(stack(hidden_NBD[:number]), chosen_NBK[:number]).sum().backward()
            optimizer.step()
    for number in range(5):
        weights = (stack.plain_weights(number) for stack in (large, small))
        for one, other in zip(*weights, strict=True):
            assert torch.equal(one, other)
