"""`/metrics` is parseable, has every definition, and counts requests and experts."""

import math
import re
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parse_text

from runtime.engine.monitor import EngineMonitor
from runtime.errors import Fault, TransferError
from runtime.generation.sampling import SamplingParams
from runtime.hf.kv import CacheSize, KVCacheBudget
from runtime.serving.choice import CompletionChoice, FinishReason
from runtime.serving.errors import QueueFull
from runtime.serving.observe.metric_definitions import DEFINITIONS
from runtime.serving.observe.metrics import ServerMetrics
from tests.builders.models import tiny_qwen2_moe
from tests.builders.served import read_in_python, serve, settle

INFO = {"version": "1", "system": "promoe", "predictor": "skip", "eviction": "lru"}
NOT_HERE = {"moecast_prefetching", "moecast_predictor_drifted"}
NOT_HERE |= {"moecast_predictor_accuracy", "moecast_predictor_card_accuracy"}
"""Metrics of adaptive prefetching, and of predictors with a card: tested below."""
TIMES = ("e2e_request_latency", "inter_token_latency", "time_to_first_token")
VLLMS_DASHBOARD = {
    *(f"vllm:{name}_seconds_{part}" for name in TIMES for part in ("bucket", "sum", "count")),
    *(f"vllm:request_{name}_time_seconds_sum" for name in ("queue", "prefill", "decode")),
    *(f"vllm:{name}_total" for name in ("prompt_tokens", "generation_tokens", "request_success")),
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket"),
    "vllm:request_max_num_generation_tokens_sum",
}
"""Series that vLLM's examples/observability/prometheus_grafana/grafana.json queries, all by
`model_name` (commit 4b5c627c)."""


@pytest.fixture
def metrics() -> ServerMetrics:
    return make_metrics()


def make_metrics(*, max_running: int = 2, **sizes: Any) -> ServerMetrics:
    """The metrics of a server whose model is loaded; its `max_length` is 100 unless given."""
    metrics = ServerMetrics(model_name="m", max_running=max_running)
    info = SimpleNamespace(**{"max_length": 100, "kv_budget": None, **sizes})
    metrics.loaded = SimpleNamespace(info=info, kept=None)  # type: ignore[assignment]
    return metrics


def make_choice(*, num_prompt_tokens: int = 3, at=100.0, **options: Any) -> CompletionChoice:
    """A choice with given times."""
    prompt, sampling = [1] * num_prompt_tokens, SamplingParams(max_new_tokens=20)
    choice = CompletionChoice(prompt, sampling, deliver=lambda _: None, **options)
    choice.arrived_at = at
    return choice


def start(metrics: ServerMetrics, choice: CompletionChoice, at: float) -> None:
    choice.started_at = at
    metrics.on_started(choice)


def step(observer: Any, at: float, *choices: CompletionChoice) -> None:
    """Add one token to each choice."""
    for choice in choices:
        choice.num_tokens += 1
        choice.first_token_at, choice.last_token_at = choice.first_token_at or at, at
    observer.on_step(0.5, list(choices))


def end(metrics: ServerMetrics, choice: CompletionChoice, at: float, reason: FinishReason) -> None:
    choice.ended_at, choice.finish_reason = at, reason
    metrics.on_ended(choice)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    folder = tiny_qwen2_moe(tmp_path_factory.mktemp("model"), num_layers=3)
    model = serve(folder, budget="25%", host_budget="75%", predictor="skip")
    model.generate(torch.arange(1, 8)[None], max_new_tokens=6, do_sample=False, pad_token_id=0)
    yield model
    model.close()


def value(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def of(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return value(metrics, name, model_name="m", engine="0", **labels)


def test_metrics__expose_every_definition_with_labels_and_kind(metrics, model):
    metrics.add_engine(EngineMonitor(model.moecast.engine), info=INFO)
    metrics.on_rejected(QueueFull("full"))
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    families = {family.name: family for family in parse_text(body.decode())}
    for metric in [one for one in DEFINITIONS.values() if one.name not in NOT_HERE]:
        family = families[metric.family]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert family.samples, metric.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)
    ours = {name for name in families if re.match("(vllm:|moecast_)(?!.*_created$)", name)}
    assert ours == {metric.family for metric in DEFINITIONS.values()}
    assert "process_resident_memory_bytes" in families


def test_metrics__include_every_series_of_vllms_dashboard(metrics: ServerMetrics) -> None:
    body, _ = metrics.render()
    samples = [sample for family in parse_text(body.decode()) for sample in family.samples]
    series = {sample.name for sample in samples if sample.labels.get("model_name") == "m"}
    assert series >= VLLMS_DASHBOARD


def test_durations__add_up_for_one_sequence(metrics: ServerMetrics) -> None:
    choice = make_choice(num_prompt_tokens=7, at=100)
    metrics.on_queued(choice)
    start(metrics, choice, 102)
    assert of(metrics, "vllm:kv_cache_usage_perc") == pytest.approx(7 / 200)
    for at in (105, 105.5, 107):
        step(metrics, at, choice)
    assert of(metrics, "vllm:kv_cache_usage_perc") == pytest.approx(10 / 200)
    end(metrics, choice, 107.25, FinishReason.LENGTH)
    sums = {
        "e2e_request_latency_seconds": 7.25, "request_queue_time_seconds": 2,
        "time_to_first_token_seconds": 5, "request_inference_time_seconds": 5.25,
        "request_prefill_time_seconds": 3, "request_decode_time_seconds": 2,
        "inter_token_latency_seconds": 2, "request_time_per_output_token_seconds": 1,
        "request_prompt_tokens": 7, "request_generation_tokens": 3,
        "request_max_num_generation_tokens": 3, "request_params_max_tokens": 20,
    }  # fmt: skip
    assert {name: of(metrics, f"vllm:{name}_sum") for name in sums} == pytest.approx(sums)
    counts = {name: of(metrics, f"vllm:{name}_count") for name in sums}
    assert counts.pop("inter_token_latency_seconds") == 2
    assert set(counts.values()) == {1}
    assert of(metrics, "vllm:prompt_tokens_total") == metrics.num_prompt_tokens == 7
    assert of(metrics, "vllm:generation_tokens_total") == metrics.num_generated_tokens == 3
    for reason, number in (("length", 1), ("stop", 0)):
        assert of(metrics, "vllm:request_success_total", finished_reason=reason) == number


def test_on_step__counts_the_tokens_of_the_forward_pass(metrics: ServerMetrics) -> None:
    first, second = make_choice(num_prompt_tokens=7), make_choice(num_prompt_tokens=5)
    for choice in (first, second):
        metrics.on_queued(choice)
        start(metrics, choice, 101)
    step(metrics, 102, first)
    step(metrics, 103, first, second)
    metrics.on_step(0.5, [first, second])  # neither has a new token
    assert of(metrics, "vllm:iteration_tokens_total_sum") == 7 + (1 + 5)
    assert of(metrics, "vllm:iteration_tokens_total_count") == 3
    assert value(metrics, "moecast_group_size", model_name="m") == 2
    assert of(metrics, "vllm:generation_tokens_total") == 3
    assert value(metrics, "moecast_step_seconds_sum", model_name="m") == pytest.approx(1.5)


def test_rejections__are_counted_from_zero(metrics: ServerMetrics) -> None:
    """A rate misses the first event of a series that appears with it."""
    name, full = "moecast_requests_rejected_total", {"model_name": "m", "status": "429"}
    assert value(metrics, name, **full | {"status": "503"}) == value(metrics, name, **full) == 0
    metrics.on_rejected(QueueFull("full"))
    assert value(metrics, name, **full) == 1


def test_kv_cache_usage__is_nan_without_a_context_length() -> None:
    assert math.isnan(of(make_metrics(max_length=None), "vllm:kv_cache_usage_perc") or 0)


def test_kv_cache_usage__is_a_share_of_kv_budget() -> None:
    metrics = make_metrics(kv_budget=KVCacheBudget(CacheSize(10, 100), 1000))
    choice = make_choice(num_prompt_tokens=5)
    metrics.on_queued(choice)
    assert of(metrics, "vllm:kv_cache_usage_perc") == 0
    start(metrics, choice, 101)
    step(metrics, 102, choice)
    assert of(metrics, "vllm:kv_cache_usage_perc") == pytest.approx(0.16)  # 6 tokens


ENDS = st.sampled_from(FinishReason)
LIVES = st.tuples(st.booleans(), st.integers(0, 4), st.integers(1, 9), ENDS)


@given(lives=st.lists(LIVES, max_size=8))
def test_gauges__are_zero_when_all_choices_have_ended(lives) -> None:
    metrics = make_metrics(max_running=4)
    choices = []
    for starts, num_tokens, num_prompt_tokens, reason in lives:
        choice = make_choice(num_prompt_tokens=num_prompt_tokens)
        metrics.on_queued(choice)
        if starts:
            start(metrics, choice, 101)
            for number in range(num_tokens):
                step(metrics, 102 + number, choice)
        choices.append((choice, reason))
    running = sum(starts for starts, *_ in lives)
    assert of(metrics, "vllm:num_requests_running") == running
    assert of(metrics, "vllm:num_requests_waiting") == len(lives) - running
    for choice, reason in choices:
        end(metrics, choice, 200, reason)
    assert of(metrics, "vllm:num_requests_running") == of(metrics, "vllm:num_requests_waiting") == 0
    assert of(metrics, "vllm:kv_cache_usage_perc") == 0
    count = partial(of, metrics, "vllm:request_success_total")
    assert sum(count(finished_reason=reason) for reason in FinishReason) == len(lives)
    assert of(metrics, "vllm:e2e_request_latency_seconds_count") == running
    given_tokens = sum(num_tokens for starts, num_tokens, *_ in lives if starts)
    assert of(metrics, "vllm:generation_tokens_total") == given_tokens


def test_expert_metrics__equal_the_engines_counters(metrics: ServerMetrics, model) -> None:
    monitor = EngineMonitor(model.moecast.engine)
    metrics.add_engine(monitor, info=INFO)
    settle(model.moecast.engine)
    state = monitor.snapshot()
    assert [tier.name for tier in state.tiers] == ["device", "host"]
    for tier in state.tiers:
        here = partial(value, metrics, model_name="m", tier=tier.name)
        assert here("moecast_cache_budget_bytes") == tier.budget_bytes
        assert here("moecast_cache_bytes") == tier.used_bytes > 0
        assert here("moecast_pinned_experts") == 0
        assert here("moecast_expert_bytes_total") == tier.total.bytes_moved > 0
        assert here("moecast_prefetch_issued_bytes_total") == tier.total.bytes_prefetched
        for layer, counters in enumerate(tier.layers):
            for name in ("hits", "joins", "misses"):
                found = here(f"moecast_expert_cache_{name}_total", layer=str(layer))
                assert found == getattr(counters, name)
            assert counters.hits + counters.joins + counters.misses == counters.requests > 0
    predicted = state.computing_layers[1]
    for layer, recall in {"0": None, "1": predicted.needed_predicted / predicted.requests}.items():
        assert value(metrics, "moecast_predictor_recall", model_name="m", layer=layer) == recall
    assert value(metrics, "moecast_stall_seconds_total", model_name="m") == state.stall_seconds
    assert value(metrics, "moecast_io_errors_total", model_name="m", kind="read") == 0
    assert value(metrics, "moecast_server_info", model_name="m", **INFO) == 1


def test_io_errors__are_counted_by_kind(tmp_path, metrics):
    model = serve(tiny_qwen2_moe(tmp_path), budget="50%")
    metrics.add_engine(EngineMonitor(model.moecast.engine), info=INFO)
    error = TransferError("its checksum is wrong", fault=Fault.DAMAGED)
    with model.moecast as handle:
        read_in_python(handle.engine)
        handle.engine.store.read = Mock(side_effect=error)
        with pytest.raises(TransferError):
            model(torch.tensor([[1, 2]]))
        count = partial(value, metrics, "moecast_io_errors_total", model_name="m")
        errors = {fault: count(kind=fault) for fault in Fault}
    assert errors.pop(Fault.DAMAGED) >= 1
    assert set(errors.values()) == {0}


def test_prefetching_gauge__exists_for_adaptive_systems_only(metrics, model, monkeypatch):
    engine = model.moecast.engine
    metrics.add_engine(EngineMonitor(engine), info=INFO)
    monkeypatch.setattr(engine, "payoff", None)
    assert value(metrics, "moecast_prefetching", model_name="m") is None
    for is_on in (True, False):
        monkeypatch.setattr(engine, "payoff", SimpleNamespace(is_on=is_on))
        assert value(metrics, "moecast_prefetching", model_name="m") == is_on
