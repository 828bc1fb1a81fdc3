"""What measuring this machine finds of machines whose times are known."""

import os
from functools import partial
from types import SimpleNamespace

import pytest

from runtime import load
from runtime.errors import TransferError
from runtime.hf.loading import load_stripped
from runtime.profiling import bandwidth, local
from runtime.profiling.bandwidth import ProbeReader, measure_reads, trimmed_mean
from runtime.profiling.local import PROMPT_TOKENS, Spans, StepParts, measure, split_step
from runtime.transfer.ring import ARRIVED
from tests.builders.families.build import save_family


class Disk:
    """A millisecond for each read and another for every hundred bytes, twice that for two readers.

    A store and its ring, whose clock is `seconds`: no time passes.
    """

    num_layers, num_experts = 2, 6

    def __init__(self):
        self.layouts = [SimpleNamespace(chunk_bytes=(100, 300), num_bytes=400, alignment=1)] * 2
        self.experts_per_layer = [6, 4]
        self.read_experts, self.num_rings = [], 0
        self.time = 0.0  # seconds of the last read

    def make_ring(self, arrivals, store, arena, num_threads, closes):
        assert (store, len(arena.slot(0)), num_threads, closes) == (self, 400, 1, False)
        self.num_rings += 1
        submit = partial(self.submit, arrivals)
        return SimpleNamespace(submit=submit, settle=lambda *_: True, close=self.close)

    def submit(self, arrivals, ticket, task):
        self.read_experts.append(task.expert)
        chunk_bytes = self.layouts[0].chunk_bytes[task.first_chunk : task.end_chunk]
        assert task.num_bytes == sum(chunk_bytes)
        self.time = self.num_rings * (1e-3 + task.num_bytes * 1e-5)
        arrivals.post(ticket, ARRIVED, self.time)

    def close(self, seconds):
        assert seconds > 0
        self.num_rings -= 1

    def seconds(self, read):
        read()
        return self.time


@pytest.fixture
def disk(monkeypatch):
    disk = Disk()
    monkeypatch.setattr(bandwidth, "seconds", disk.seconds)
    monkeypatch.setattr(bandwidth, "StoreRing", disk.make_ring)
    return disk


def test_measure_reads__fits_fixed_and_marginal_cost(disk):
    reads = measure_reads(disk)
    assert (reads.per_byte, reads.fixed, reads.speed_together) == pytest.approx((1e-5, 1e-3, 0.5))


def test_reader__comes_to_every_expert(disk):
    with ProbeReader(disk) as reader:
        for _ in range(12):
            reader.chunk()
    # The second layer has four experts.
    assert set(disk.read_experts) == ({(0, e) for e in range(6)} | {(1, e) for e in range(4)})


def test_reader__says_what_cannot_be_read(tiny):
    store = load_stripped(tiny, "float32").open_store()
    with ProbeReader(store) as reader:
        reader.expert()
        for shard in tiny.glob("*.safetensors"):
            os.truncate(shard, 4096)
        with pytest.raises(TransferError, match="ends at byte 4096"):
            reader.expert()
    store.close()


def test_typical__is_the_mean_without_the_slowest():
    assert trimmed_mean([1.0] * 12 + [2.0] * 12 + [1000.0]) == pytest.approx(1.5)
    assert trimmed_mean([3.0]) == 3.0


def test_parts_of__a_step_is_taken_apart():
    spans = Spans()
    # 3 s before the first layer, layers of 2 s, experts of 1 s with .5 s around each, 4 s after
    # the last; the second layer holds a prediction of .25 s and an event without an answer, its
    # router's input has another prediction.
    spans.computed_dense(0, 0.0, 5.0)
    spans.computed((0, 1), 5.5, 6.5)
    spans.computed((0, 2), 7.0, 8.0)
    spans.computed_dense(1, 8.0, 10.25)
    spans.predicted("layer_input", 1, 9.0, 9.25)
    spans.predicted("routed", 1, 9.5, 9.5)
    spans.predicted("gate_input", 2, 10.25, 10.5)
    spans.computed((1, 3), 11.0, 12.0)
    # The last expert came 2 s late.
    spans.stalled(1, 12.0, 14.0)
    spans.computed((1, 4), 14.5, 15.5)
    spans.step(1, 0.0, 19.5)
    # Another step, which is none of this one's.
    spans.computed_dense(0, 20.0, 29.0)
    expected = {"layer": 2.0, "expert": 1.5, "prediction": 0.25, "rest": 7.0, "total": 17.5}
    assert vars(split_step(spans, 0.0, 19.5)) == pytest.approx(expected)


def test_measure__adds_up_to_a_step_and_restores_the_model():
    model = load(budget="50%")
    with model.moecast:
        engine = model.moecast.engine
        found = measure(model)
        shape = model.moecast.spec
        one_layer = found.layer_seconds(1) + shape.top_k * found.expert_seconds(1)
        step = found.overheads.step_seconds + shape.num_layers * one_layer
        # The step's own clock, in the same run: the parts are medians of the same steps. Wide
        # bounds, for a busy machine may delay one part and not another.
        assert 0.05 < step / found.step_seconds < 20
        assert sum(found.chunk_bytes) == engine.store.layouts[0].num_bytes
        for speed in ("transfer_speed_together", "compute_speed_transferring"):
            assert 0 < getattr(found.overheads, speed) <= 1
        assert engine.swap_timeline(None) is None


def test_measure__one_token_takes_what_it_took(monkeypatch):
    """What further tokens add is not added to the first, too."""
    parts = StepParts(layer=5.0, expert=2.0, prediction=0.0, rest=1.0, total=90.0)
    monkeypatch.setattr(local, "average_steps", lambda _spans: parts)
    monkeypatch.setattr(local, "_expert_seconds", lambda *_: (1.0, 16.0))
    model = load(budget="50%")
    with model.moecast:
        found = measure(model)
    seconds = found.expert_seconds(1), found.expert_seconds(3), found.layer_seconds(1)
    assert seconds == pytest.approx((2.0, 4.0, 5.0))


def test_measure__a_model_whose_window_is_full(tmp_path):
    """Its caches forget the token that the one measured again would be cut back to."""
    model = load(save_family(tmp_path, "gpt_oss"))
    with model.moecast:
        assert model.config.sliding_window < PROMPT_TOKENS
        assert measure(model).step_seconds > 0
