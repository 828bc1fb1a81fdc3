"""Generations in step: each gives what it gives alone, whatever happens to the others."""

import gc
import traceback
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from runtime.config import SystemConfig
from runtime.errors import GroupError, TransferError
from runtime.generation.lockstep.group import LockstepGroup
from tests.builders import lockstep, served
from tests.builders.lockstep import answer, answer_together, assert_equal, results_of, run
from tests.builders.models import tiny_qwen2_moe
from tests.builders.predictors import SignalLog, small_spec
from tests.builders.served import before_transfers, count_pins, serve, serve_with_transfers

PROMPTS = lockstep.PROMPTS[:4]


@pytest.fixture(scope="module")
def model(folder):
    with served.serving(folder, budget="30%") as model:
        yield model


SYSTEMS = {
    "promoe": SystemConfig(),
    "one by one": SystemConfig(early_preemption=False),
    "klotski": SystemConfig(hot_first=True, drop_used=True),
    "global": SystemConfig(reordered=False, per_layer=False, eviction="lfu"),
}
# Where all experts fit, one system decides as another.
CASES = [*((name, "30%") for name in SYSTEMS), ("promoe", "100%")]


@pytest.mark.parametrize(("name", "budget"), CASES)
def test_group__members_give_what_they_give_alone(tmp_path, name, budget):
    model = serve(tiny_qwen2_moe(tmp_path), budget=budget, system=SYSTEMS[name])
    expected = [answer(model, tokens) for tokens in PROMPTS]
    with model.moecast, LockstepGroup(model) as group:
        sequences = []
        for tokens in PROMPTS:  # each begins a step later than the one before
            sequences.append(group.start(partial(answer, model, tokens)))
            group.step()
        run(group)
        assert_equal(results_of(sequences), expected)
        assert count_pins(model.moecast.engine) == 0


def test_group__early_requests_leave_an_earlier_layer_its_slots(tmp_path):
    """Members that are ahead may hold every slot while others still need the layer before."""
    model = serve(tiny_qwen2_moe(tmp_path), budget="30%", system=SystemConfig(per_layer=False))
    with model.moecast as handle:
        engine = handle.engine
        slots = engine.cache.num_slots
        engine.begin_step(np.array([1, 2]), np.array([0, 1]))
        assert [list(batch) for batch in engine.ready(0, [0])] == [[0]]
        engine.partly_routed(1, np.arange(slots + 2).reshape(1, -1))
        entries = engine.cache.top.cache.entries
        served.settle(engine)
        assert len(entries) == slots
        assert all(entry.pins for entry in entries.values())
        assert [list(batch) for batch in engine.ready(0, [1])] == [[1]]
        computed = [expert for batch in engine.ready(1, list(range(slots + 2))) for expert in batch]
        assert sorted(computed) == list(range(slots + 2))
        engine.end_step()
        assert count_pins(engine) == 0


def test_group__predictors_are_shown_one_step_of_all(folder):
    spec = small_spec(num_layers=3, num_experts=12, top_k=2, hidden_size=32)
    alone = []
    for tokens in PROMPTS:
        predictor = SignalLog(spec)
        with served.serving(folder, budget="60%", predictor=predictor) as model:
            answer(model, tokens)
        alone.append(predictor.steps)
    together = SignalLog(spec)
    with served.serving(folder, budget="60%", predictor=together) as model:
        answer_together(model, PROMPTS)
    assert len(together.steps) == lockstep.ANSWER_TOKENS
    for number, step in enumerate(together.steps):
        parts = [steps[number] for steps in alone]
        assert [event[:2] for event in step] == [event[:2] for event in parts[0]]
        for place, (name, _, value) in enumerate(step):
            own = [part[place][2] for part in parts]
            if name == "requests":
                own = [np.full_like(rows, number) for number, rows in enumerate(own)]
            joined = np.concatenate(own)
            assert (value.dtype, value.tolist()) == (joined.dtype, joined.tolist())


def test_group__an_expert_is_read_once_for_all(tmp_path, monkeypatch):
    reads: Counter = Counter()

    def count(task):
        reads[task.expert] += task.first_chunk == 0

    system = SystemConfig(drop_used=True, prefetch=False)
    folder = tiny_qwen2_moe(tmp_path, num_experts=16, top_k=4)
    options = {"budget": "30%", "system": system}
    model = serve_with_transfers(folder, monkeypatch, before_transfers(count), **options)
    with model.moecast, LockstepGroup(model) as group:
        for tokens in PROMPTS * 3:
            group.start(partial(answer, model, tokens))
        while group.sequences:
            reads.clear()
            group.step()
            assert set(reads.values()) <= {1}
            assert sum(reads.values()) <= 2 * 16
        assert model.moecast.stats()["misses"] > 0


def test_group__draws_are_those_of_the_seed(model):
    sampling, expected = {"do_sample": True, "temperature": 2.0}, []
    for seed, tokens in enumerate(PROMPTS):
        torch.manual_seed(seed)
        expected.append(answer(model, tokens, **sampling))
    torch.manual_seed(99)
    outside = torch.get_rng_state()
    assert_equal(answer_together(model, PROMPTS, **sampling), expected)
    assert torch.equal(torch.get_rng_state(), outside)


def test_group__one_that_is_cancelled_or_fails_leaves_the_others_as_they_are(model):
    expected = [answer(model, tokens) for tokens in PROMPTS]

    def fails():
        answer(model, PROMPTS[2], max_new_tokens=3)
        raise ValueError("mine")

    with LockstepGroup(model) as group:
        sequences = [group.start(partial(answer, model, tokens)) for tokens in PROMPTS]
        never_begun = group.start(partial(answer, model, PROMPTS[0]))
        group.cancel(never_begun)
        failing = group.start(fails)
        group.step()
        group.step()
        group.cancel(sequences[1])
        assert (sequences[1].is_done, sequences[1].result, sequences[1].error) == (True, None, None)
        assert len(group.sequences) == 4
        run(group)
        for place in (0, 2, 3):
            assert torch.equal(sequences[place].result, expected[place])
        assert never_begun.result is None
        assert isinstance(failing.error, ValueError)
        assert count_pins(model.moecast.engine) == 0


@pytest.fixture
def no_search_for_cycles():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("end", ["by itself", "in an error", "cancelled", "before it began"])
def test_group__what_a_member_held_is_free_when_it_has_ended(model, no_search_for_cycles, end):
    """At once: Python looks for cycles rarely, and caches of keys and values are large."""

    def work(held):
        mine = held
        answer(model, PROMPTS[2])
        if end == "in an error":
            raise ValueError(mine)

    with LockstepGroup(model) as group:
        held = torch.zeros(1)  # stands for something large
        freed = weakref.ref(held)
        sequence = group.start(partial(work, held), seed=1)
        del held
        if end != "before it began":
            group.step()
            group.step()
        if end in ("cancelled", "before it began"):
            group.cancel(sequence)
        else:
            run(group)
        assert sequence.is_done
        assert (freed() is None) == (end != "in an error")  # its traceback shows it
        ended = weakref.ref(sequence)
        del sequence
        assert ended() is freed() is None


def test_group__caches_are_free_when_a_read_has_failed(folder, monkeypatch, no_search_for_cycles):
    before_each = Mock()

    def caches() -> int:
        return sum(type(one) is DynamicCache for one in gc.get_objects())

    options = {"budget": "30%", "system": SystemConfig(prefetch=False)}
    model = serve_with_transfers(folder, monkeypatch, before_transfers(before_each), **options)
    with model.moecast, LockstepGroup(model) as group:
        before = caches()
        sequences = [group.start(partial(answer, model, tokens)) for tokens in PROMPTS]
        group.step()
        assert caches() == before + len(sequences)
        before_each.side_effect = TransferError
        run(group)
        assert {type(sequence.error) for sequence in sequences} == {TransferError}
        assert caches() == before
        assert "generate" in "".join(traceback.format_tb(sequences[0].error.__traceback__))


def test_group__ctrl_c_closes_it_and_the_model_serves_on(model):
    expected, group = answer(model, PROMPTS[0]), LockstepGroup(model)
    sequences = [group.start(partial(answer, model, tokens)) for tokens in PROMPTS]
    group.step()
    ready = model.moecast.engine.ready

    def interrupted(layer, wanted):
        if layer == 1:
            raise KeyboardInterrupt
        return ready(layer, wanted)

    with patch.object(model.moecast.engine, "ready", interrupted), pytest.raises(KeyboardInterrupt):
        group.step()
    assert all(sequence.is_done for sequence in sequences)
    with pytest.raises(GroupError, match="closed"):
        group.start(lambda: None)
    assert torch.equal(answer(model, PROMPTS[0]), expected)
    assert count_pins(model.moecast.engine) == 0


def test_group__others_use_the_model_meanwhile(model):
    expected = [answer(model, tokens) for tokens in PROMPTS]
    with LockstepGroup(model) as group, ThreadPoolExecutor(1) as pool:
        sequences = [group.start(partial(answer, model, tokens)) for tokens in PROMPTS]
        group.step()
        found = pool.submit(answer, model, PROMPTS[3])
        run(group)
        assert torch.equal(found.result(), expected[3])
        assert_equal(results_of(sequences), expected)


def test_group__what_cannot_be_is_refused(model):
    with pytest.raises(GroupError, match=r"runtime\.load"):
        LockstepGroup(torch.nn.Linear(1, 1))
    with LockstepGroup(model), pytest.raises(GroupError, match="already has a lockstep group"):
        LockstepGroup(model)
    with LockstepGroup(model) as second:
        assert second.step() == []
