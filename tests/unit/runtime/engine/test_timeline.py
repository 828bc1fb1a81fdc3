"""The timeline is a Chrome trace that adds up; without one nothing is written."""

import json

import torch

from predictors.baselines import SkipPredictor
from tests.builders.models import tiny_qwen2_moe
from tests.builders.served import serve

TOKENS = torch.randint(1, 64, (1, 6), generator=torch.Generator().manual_seed(5))


def routers(model) -> SkipPredictor:
    """The model's own routers as a predictor."""
    matrices = torch.stack([layer.mlp.gate.weight for layer in model.model.layers])
    return SkipPredictor(model.moecast.spec, matrices.detach().float().numpy(), None)


def test_timeline__spans_counters_and_flows(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=4, num_experts=16)
    first = serve(folder)
    predictor = routers(first)
    first.close()
    path = tmp_path / "deep" / "trace.json"
    model = serve(folder, budget="25%", predictor=predictor, trace_events=path)
    with model.moecast:
        model.generate(TOKENS, max_new_tokens=12, do_sample=False, pad_token_id=0)
        stats = model.moecast.stats()
        assert not path.exists()
    trace = json.loads(path.read_text())
    assert list(tmp_path.glob("deep/*.partial")) == []
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C", "s", "f"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    by_kind = {kind: [e for e in spans if e["cat"] == kind] for kind in {e["cat"] for e in spans}}
    assert {"fetch", "prefetch", "expert", "stall", "predict", "prefill", "decode"} <= set(by_kind)
    moved = sum(e["args"]["bytes"] for e in by_kind["fetch"] + by_kind["prefetch"])
    assert moved == stats["bytes_moved"]
    assert sum(e["args"]["bytes"] for e in by_kind["prefetch"]) == stats["bytes_prefetched"]
    assert len(by_kind["expert"]) == stats["requests"]
    assert len(by_kind["decode"]) == stats["num_decode_steps"] == 11
    counters = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert counters == sorted(counters)
    assert counters[-1] == moved
    starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert ends
    assert all(starts[number] <= ends[number] for number in ends)
    stalled = sum(event["dur"] for event in by_kind["stall"]) / 1e6
    assert abs(stalled - stats["stall_seconds"]) < 0.01


def test_timeline__tracks_do_not_overlap(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=4, num_experts=16)
    path = tmp_path / "trace.json"
    model = serve(folder, budget="25%", host_budget="50%", trace_events=path)
    with model.moecast:
        model.generate(TOKENS, max_new_tokens=12, do_sample=False, pad_token_id=0)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"compute", "copy 1", "disk 1"} <= set(names.values())
    for track in names:
        spans = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == track)
        for (start, duration), (following, _) in zip(spans, spans[1:], strict=False):
            assert start + duration <= following + 0.2  # microseconds; times are rounded to 0.1
