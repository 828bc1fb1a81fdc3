"""The ablation's perfect forecasts."""

from benchmarks.moecast import perfect_forecasts
from tests.builders.traces import make_spec, make_trace


def test_perfect_forecasts__are_the_routing_of_later_layers(tmp_path):
    spec = make_spec(num_layers=3)
    steps = list(make_trace(tmp_path / "trace", spec=spec).steps("held_out"))[:5]
    player = perfect_forecasts(steps, spec).predictor(spec)
    for step in steps:
        chosen = [set(step.experts(layer).ravel().tolist()) for layer in range(3)]
        first = player.begin_step(step.tokens_T, step.requests_T)
        assert [set(one.experts(spec.top_k)) for one in first] == chosen
        for layer in range(3):
            later = player.gate_input(layer, None)
            assert [one.layer for one in later] == list(range(layer + 1, 3))
            assert all(set(one.experts(spec.top_k)) == chosen[one.layer] for one in later)
