"""Sequences that share products: none has other bits because of the others, or of their number."""

import logging
from functools import partial
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from runtime.config import Exact, SystemConfig
from runtime.errors import TransferError
from runtime.generation.lockstep.group import LockstepGroup
from runtime.hf.loading import load_plain
from runtime.hf.row_block import NUM_ROWS, SMALL_BLOCK_ROWS, BlockCacheLayer
from runtime.hf.sharing import choose_heights, find_row_dependence, set_shared_reference
from tests.builders.families.build import save_family
from tests.builders.lockstep import PROMPTS, answer, answer_together, assert_equal, results_of, run
from tests.builders.models import tiny_qwen2_moe
from tests.builders.predictors import SignalLog, small_spec
from tests.builders.served import before_transfers, count_pins, serve, serve_with_transfers, serving

NUM_CLIENTS = NUM_ROWS + 1
"""More than one block has room for."""
SHARING = ("qwen2_moe", "dots1", "mixtral", "olmoe", "qwen3_moe", "glm4_moe", "gemma4")
"""Families with and without shared experts, biased routers, grouped queries, and windows."""


CASES = [
    *((name, "bfloat16") for name in SHARING),
    *((name, "float32") for name in ("qwen2_moe", "mixtral", "gemma4")),
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_block__is_what_transformers_computes_for_a_batch_of_copies(tmp_path, name, dtype):
    folder = save_family(tmp_path, name, dtype=getattr(torch, dtype))
    plain = load_plain(folder, dtype=getattr(torch, dtype))
    assert set_shared_reference(plain) is Exact.SHARED
    expected = [answer(plain, tokens) for tokens in PROMPTS]
    options = {"budget": "50%", "system": SystemConfig(), "exact": Exact.SHARED}
    with serving(folder, **options) as model, LockstepGroup(model) as group:
        assert model.moecast.exact is Exact.SHARED
        tasks = []
        for number, tokens in enumerate(PROMPTS):  # two join, then there is a step
            tasks.append(group.start(partial(answer, model, tokens)))
            if number % 2:
                group.step()
        assert len(group.sequences) == NUM_CLIENTS
        run(group)
        assert_equal(results_of(tasks), expected)


def test_block__has_the_bits_of_copies_with_several_threads_too(tmp_path):
    """Threads divide the keys of one sequence, which changes bits, but not those of a batch."""
    folder = tiny_qwen2_moe(tmp_path, num_layers=1)
    plain = load_plain(folder, dtype=torch.float32)
    torch.set_num_threads(2)
    set_shared_reference(plain)
    expected = [answer(plain, tokens, max_new_tokens=2) for tokens in PROMPTS[2:4]]
    with serving(folder, budget="100%", exact=Exact.SHARED) as model:
        assert_equal(answer_together(model, PROMPTS[2:4], max_new_tokens=2), expected)
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("num_clients", [2, NUM_CLIENTS])
def test_block__companions_change_no_bit(tmp_path, num_clients):
    """They begin, end and are cancelled at different steps, with prompts of different lengths."""
    model = serve(tiny_qwen2_moe(tmp_path), budget="40%", exact=Exact.SHARED)
    lengths = [{"max_new_tokens": 4 + 2 * (number % 4)} for number in range(num_clients)]
    asked = list(zip(PROMPTS[:num_clients], lengths, strict=True))
    expected = [answer_together(model, [tokens], **length)[0] for tokens, length in asked]
    with model.moecast, LockstepGroup(model) as group:
        leaving, tasks = group.start(partial(answer, model, PROMPTS[4])), []
        for tokens, length in asked:
            tasks.insert(0, group.start(partial(answer, model, tokens, **length)))
            if len(tasks) % 2 == 0:
                group.step()
            if len(tasks) == 2:
                group.cancel(leaving)
        run(group)
        assert_equal(results_of(tasks[::-1]), expected)


@pytest.mark.parametrize("num_clients", [1, 3])
def test_block__predictors_see_the_sequences_and_no_spare_row(tmp_path, num_clients):
    watching = SignalLog(small_spec(num_layers=2, num_experts=8, top_k=2, hidden_size=32))
    options = {"budget": "40%", "exact": Exact.SHARED, "predictor": watching}
    with serving(tiny_qwen2_moe(tmp_path), **options) as model:
        watching.steps.clear()
        answer_together(model, [torch.tensor([[5]])] * num_clients, max_new_tokens=5)
        assert {len(rows) for step in watching.steps for _, _, rows in step} == {num_clients}
        first, *later = (step[1][2].tolist() for step in watching.steps)
        assert len(set(first)) == num_clients
        assert later == [first] * 4


@pytest.mark.parametrize("exact", [Exact.EAGER, Exact.SHARED])
def test_group__a_failed_read_ends_those_who_needed_the_expert(tmp_path, monkeypatch, exact):
    """In a block, the others repeat the step, with the KV caches that they had before."""
    broken: set[tuple[int, int]] = set()
    read_experts: set[tuple[int, int]] = set()

    def fail(task):
        read_experts.add(task.expert)
        if task.expert in broken:
            raise TransferError(f"{task.expert} is broken")

    folder = tiny_qwen2_moe(tmp_path, num_experts=16, top_k=1)
    system = SystemConfig(prefetch=False, drop_used=True)
    options = {"budget": "30%", "system": system, "exact": exact}
    model = serve_with_transfers(folder, monkeypatch, before_transfers(fail), **options)
    single = [tokens[:, :1] for tokens in PROMPTS[:4]]
    with model.moecast:
        expected, chosen = [], []
        for tokens in single:
            read_experts.clear()
            expected += answer_together(model, [tokens])
            chosen.append(set(read_experts))
        own = [one.difference(*chosen[:i], *chosen[i + 1 :]) for i, one in enumerate(chosen)]
        victim = next(number for number, experts in enumerate(own) if experts)
        with LockstepGroup(model) as group:
            tasks = [group.start(partial(answer, model, tokens)) for tokens in single]
            group.step()
            broken.update(own[victim])
            run(group)
        assert isinstance(tasks.pop(victim).error, TransferError)
        failed = expected.pop(victim)
        assert_equal(results_of(tasks), expected)
        broken.clear()
        assert_equal(answer_together(model, [single[victim]]), [failed])
        assert count_pins(model.moecast.engine) == 0


@pytest.mark.parametrize("make", [DynamicLayer, partial(DynamicSlidingWindowLayer, 5)])
@pytest.mark.parametrize("failing", [1, 2, 3, 4, 5, 6])
def test_undo__after_an_append_that_failed_no_sequence_lacks_a_token(monkeypatch, make, failing):
    layers = [make() for _ in range(3)]
    for number, layer in enumerate(layers):
        layer.update(*torch.rand(2, 1, 1, 3 + number, 2))
    before = [(layer.keys, layer.values, layer.get_seq_length()) for layer in layers]
    calls = [torch.OutOfMemoryError if call == failing else DEFAULT for call in range(1, 7)]
    block = BlockCacheLayer(layers)
    monkeypatch.setattr(torch, "cat", Mock(wraps=torch.cat, side_effect=calls))
    with pytest.raises(torch.OutOfMemoryError):
        block.update(*torch.rand(2, 3, 1, 1, 2))
    block.undo()
    for layer, (keys, values, length) in zip(layers, before, strict=True):
        assert layer.get_seq_length() == length
        assert torch.equal(torch.stack([layer.keys, layer.values]), torch.stack([keys, values]))


NOT_SHARED = [
    *[("dbrx", "with other code"), ("deepseek_v3", "cached states outside of attention")],
    *[("gpt_oss", "its attention is eager"), ("qwen3_next", "layers of another kind")],
]


@pytest.mark.parametrize(("name", "reason"), NOT_SHARED)
def test_sharing__falls_back_to_eager_and_says_why(tmp_path, caplog, name, reason):
    folder = save_family(tmp_path, name)
    tokens = PROMPTS[2]
    expected = answer(load_plain(folder, dtype=torch.float32), tokens)
    with caplog.at_level(logging.WARNING):
        model = serve(folder, budget="100%", exact=Exact.SHARED)
    (line,) = [r.getMessage() for r in caplog.records if "exact=shared" in r.getMessage()]
    assert reason in line
    with model.moecast:
        assert model.moecast.exact is Exact.EAGER
        assert_equal(answer_together(model, [tokens] * 2), [expected] * 2)


def test_check__keeps_to_the_largest_block_where_small_ones_have_other_bits(tmp_path):
    def disturb(_module: torch.nn.Module, _args: tuple, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + 1e-6) if output.shape[0] == SMALL_BLOCK_ROWS else output

    with serving(tiny_qwen2_moe(tmp_path), budget="100%", exact=Exact.SHARED) as model:
        assert model.moecast.block_heights == (SMALL_BLOCK_ROWS, NUM_ROWS)
        model.model.norm.register_forward_hook(disturb)
        assert choose_heights(model, None) == (NUM_ROWS,)


DEPENDENT_ROWS = {
    "next to other rows": lambda output: output + 1e-6 * output.sum(dim=0, keepdim=True),
    "differ from those of one sequence": lambda output: output * (1 + (len(output) == NUM_ROWS)),
}


@pytest.mark.parametrize(("message", "hook"), DEPENDENT_ROWS.items())
def test_check__notices_rows_that_depend_on_others_and_unknown_states(tmp_path, message, hook):
    with serving(tiny_qwen2_moe(tmp_path), budget="100%", exact=Exact.SHARED) as model:
        assert find_row_dependence(model) is None
        model.model.norm.register_forward_hook(lambda _module, _args, output: hook(output))
        assert message in find_row_dependence(model)
