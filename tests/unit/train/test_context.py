"""Decaying means of earlier states against a sum written out."""

import tracemalloc

import numpy as np
import pytest

from collect.traces import TraceSignal
from tests.builders.traces import make_spec, make_trace
from train.data import WARM_UP, InputSpec, TraceBatches, TraceSubset, read_contexts


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.8])
def test_contexts__is_the_weighted_sum_over_the_requests_earlier_rows(tmp_path, decay: float):
    sizes = {"requests_per_unit": 4, "prompt_tokens": WARM_UP + 20, "new_tokens": 4}
    trace = make_trace(tmp_path / "t", **sizes)
    rows = np.array([0, 1, 2, 3, 9, 30, 47, 48, 49, 50, 100, 101])
    columns = [trace.column("gate_input", layer) for layer in range(2)]
    found, weights = read_contexts(columns, rows, requests=trace.requests, decays=(decay,))
    for place, row in enumerate(rows.tolist()):
        past = np.arange(row - 1, int(np.searchsorted(trace.requests, trace.requests[row])) - 1, -1)
        weight = (1 - decay) * decay ** np.arange(len(past), dtype=float)
        for layer, column in enumerate(columns):
            expected = weight @ column[past].astype(np.float64)
            # What is older than the warm-up is left out: .8 ** 24 of a state of size 2.
            np.testing.assert_allclose(found[0, layer, place], expected, atol=0.02)
        assert weights[0, place] == pytest.approx(weight.sum(), abs=0.005)


def test_batches__hold_a_pool_in_memory_and_never_the_trace(tmp_path) -> None:
    """Memory-mapped columns are not counted: what is counted is what was read into memory."""
    sizes = {"requests_per_unit": 100, "prompt_tokens": 30, "new_tokens": 2}
    trace = make_trace(tmp_path / "t", spec=make_spec(hidden_size=256), **sizes)
    signals = frozenset({TraceSignal.GATE_INPUT, TraceSignal.LAYER_INPUT})
    size = sum(one.stat().st_size for one in trace.path.glob("*.arrow"))
    batches = TraceBatches(
        trace, TraceSubset.FIT, batch_size=64, needs=InputSpec(signals, (0.0, 0.8)), epoch=0,
        pool_bytes=size // 50,
    )  # fmt: skip
    tracemalloc.start()
    seen = sum(batch.chosen_LBK.size(1) for batch in batches)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == len(batches) * 64
    assert size > 20_000_000
    assert peak < size / 3
