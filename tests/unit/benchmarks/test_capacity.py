"""The arithmetic of docs/capacity.md, by hand, and the cost of a real pull by another server."""

import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks import reports
from benchmarks.capacity.egress import PullCost, measure_pull, plan_egress
from benchmarks.capacity.memory import (
    MODELS,
    PROCESS_BYTES,
    ModelMemory,
    ServedModel,
    count_memory,
    plan_machine,
)
from benchmarks.capacity.recordings import (
    RecordedRun,
    compare_runs,
    plan_trace,
    read_training,
    record_prompts,
)
from benchmarks.capacity.replays import (
    BUDGETS,
    SYSTEMS,
    ReplayCost,
    ReplayRequest,
    measure_replays,
)
from benchmarks.real_size.model import QWEN3_30B_A3B
from benchmarks.tables import capacity
from runtime.compiled import is_compiled
from runtime.config import ShapeConfig
from runtime.presets import load_shape
from tests.builders.web import served
from zoo.catalog import Zoo
from zoo.locations import BUILTIN, open_zoo_storage
from zoo.pull import PullCache, pull_entry
from zoo.storage import FolderStorage

GIB = 2**30


def test_memory__is_counted_per_token_layer_and_user() -> None:
    model = ServedModel(shape="small", num_kv_heads=2, head_dim=8, vocab_size=100)
    shape = ShapeConfig(num_layers=3, hidden_size=16, layer_bytes=1000)
    # Two vectors of 2 x 8 values of two bytes in each of three layers.
    assert model.kv_bytes_per_token(shape) == 3 * 2 * 16 * 2
    # Three layers, and an embedding and an output of 100 x 16 values of two bytes each.
    assert model.dense_bytes(shape) == 3000 + 2 * 100 * 16 * 2


def test_memory__of_a_real_model_is_that_of_its_weights() -> None:
    """Transformers' own module, without memory, has the weights that the table counts."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(
            Qwen3MoeConfig(**QWEN3_30B_A3B), dtype=torch.bfloat16
        )
    experts = sum(p.nbytes for name, p in whole.named_parameters() if ".experts." in name)
    dense = sum(p.nbytes for p in whole.parameters()) - experts
    (model,) = [model for model in MODELS if model.shape == "qwen3-30b-a3b"]
    memory = count_memory(model, users=2, context_tokens=10)
    assert memory.experts_bytes == experts
    assert memory.dense_bytes == pytest.approx(dense, rel=1e-3)  # norms are left out
    attention = whole.model.layers[0].self_attn
    values = attention.k_proj.out_features + attention.v_proj.out_features
    assert memory.kv_bytes == 2 * 10 * len(whole.model.layers) * values * 2


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.shape)
def test_memory__key_value_heads_agree_with_the_shape(model: ServedModel) -> None:
    """A layer's other weights hold at least its keys' and values' projections."""
    shape = load_shape(model.shape)
    projections = 2 * shape.hidden_size * model.num_kv_heads * model.head_dim
    assert shape.layer_bytes > projections * shape.bytes_per_weight


def plain_memory(*, dense: int, kv: int, experts: int) -> ModelMemory:
    return ModelMemory(
        shape="any",
        users=1,
        context_tokens=1,
        kv_bytes_per_token=kv,
        kv_bytes=kv,
        dense_bytes=dense,
        experts_bytes=experts,
    )


def test_machine__gives_experts_what_dense_weights_and_caches_leave() -> None:
    small = plain_memory(dense=2 * GIB, kv=GIB, experts=10 * GIB)
    large = plain_memory(dense=3 * GIB, kv=2 * GIB, experts=30 * GIB)
    plan = plan_machine(30 * GIB, [small, large])
    assert plan.left_bytes == 30 * GIB - 8 * GIB - 2 * PROCESS_BYTES
    assert plan.expert_share == plan.left_bytes / (40 * GIB)
    assert plan_machine(900 * GIB, [small]).expert_share == 1.0


def test_machine__that_is_too_small_says_by_how_much() -> None:
    plan = plan_machine(2 * GIB, [plain_memory(dense=2 * GIB, kv=GIB, experts=GIB)])
    assert plan.left_bytes == -GIB - PROCESS_BYTES
    assert plan.expert_share == 0.0
    assert capacity.describe_share(plan) == "none: 2.0 GiB missing"


COST = PullCost(
    what="model/kind",
    requests=5,
    num_bytes=1350,
    index_bytes=100,
    blobs=3,
    blob_bytes=1200,
    again_requests=1,
    again_bytes=100,
)


def test_egress__of_each_layout() -> None:
    layouts = plan_egress(COST, machines=1000, edges=10, sites=4, uplink_bytes_per_second=1000.0)
    figures = [(one.origin_requests, one.origin_bytes, one.seconds) for one in layouts]
    assert figures == [
        (5000, 1_350_000, 1350.0),
        # Every machine's index, and each of three blobs once for each of ten caches.
        (1000 + 30, 100_000 + 12_000, 112.0),
        (20, 5400, 5.4),
    ]


def test_pull__costs_what_another_server_counts(tmp_path) -> None:
    """The command against the counting server, the same pull against the tests' web server."""
    name = "qwen2-moe-tiny/dependency"
    cost = measure_pull(name, BUILTIN)
    with served(BUILTIN) as (address, site):
        zoo = Zoo(open_zoo_storage(address))
        index = zoo.read_index()
        digest = index.entries[name].latest
        cache = PullCache(FolderStorage(tmp_path / "cache"))
        pull_entry(zoo, name, digest, index.version(name, digest), cache=cache)
    assert cost.requests == sum(site.gets.values())
    assert cost.num_bytes == sum(site.sent.values())
    assert cost.blobs == len(site.gets) - 1
    assert cost.index_bytes == site.sent["index.json"] == (BUILTIN / "index.json").stat().st_size
    assert (cost.again_requests, cost.again_bytes) == (1, cost.index_bytes)


def recorded(tokens: int, cpu_seconds: float) -> RecordedRun:
    return RecordedRun(
        prompts=1, tokens=tokens, num_bytes=50 * tokens, parts=1, cpu_seconds=cpu_seconds
    )


def test_recording__leaves_out_the_start_and_takes_the_median() -> None:
    pairs = [
        (recorded(100, 7.0), recorded(1100, 9.0)),
        (recorded(100, 7.0), recorded(1100, 10.0)),
        (recorded(100, 7.0), recorded(1100, 17.0)),
    ]
    cost = compare_runs(pairs, planned_bytes_per_token=48)
    assert cost.core_seconds_per_token == [0.002, 0.003, 0.01]
    assert cost.tokens_per_core_second == pytest.approx(1000 / 3)
    assert cost.bytes_per_token == 50.0


def test_trace__has_disk_files_and_cores() -> None:
    plan = plan_trace(
        "any", tokens=10**9, bytes_per_token=50, part_bytes=10**9, core_seconds_per_token=0.001
    )
    assert plan.num_bytes == 5e10
    assert plan.files == 2 * 50  # each part's columns, and its requests
    assert plan.core_hours == pytest.approx(10**6 / 3600)
    assert plan.workers_for_a_day == 12  # 11.57 days of one core
    unknown = plan_trace(
        "any", tokens=10, bytes_per_token=1, part_bytes=100, core_seconds_per_token=None
    )
    assert (unknown.files, unknown.core_hours, unknown.workers_for_a_day) == (2, None, None)


def test_training__speed_counts_every_epoch() -> None:
    def part(steps: int, seconds: float) -> dict:
        run = {"kinds": ["mlp", "reuse"], "networks": 7, "batch_size": 256}
        return {**run, "steps": steps, "seconds": seconds}

    document = {
        "origin": {"machine": "two cores"},
        "training": part(100, 64.0),
        "keeping": {"training": part(100, 6.4)},
    }
    both, reuse = read_training(document)
    assert (both.tokens_per_second, reuse.tokens_per_second) == (400.0, 4000.0)
    assert both.hours(1_440_000, epochs=2) == 2.0
    assert both.what == "mlp, reuse (7 networks together)"


def test_replays__of_many_steps_are_shared_among_cores() -> None:
    cost = ReplayCost(
        system="moecast",
        budget="10%",
        is_compiled=True,
        decode_steps=100,
        prefills=4,
        step_seconds=[3e-3, 1e-3, 2e-3],
    )
    assert cost.wall_seconds(1_000_000, cores=2) == pytest.approx(1000)


def test_replays__are_measured_compiled_and_not(tmp_path: Path) -> None:
    record_prompts(8, tmp_path)
    request = ReplayRequest(
        trace=str(tmp_path / "trace"), model="qwen2-moe-tiny", new_tokens=20, repetitions=2
    )
    costs = measure_replays(request, tmp_path / "replays", cores=2)
    measured = {(cost.system, cost.budget, cost.is_compiled) for cost in costs}
    modes = {is_compiled(), False}
    assert measured == set(itertools.product(SYSTEMS, BUDGETS, modes))
    for cost in costs:
        assert cost.decode_steps >= 20
        assert len(cost.step_seconds) == 4
        assert min(cost.step_seconds) > 0


def test_tables__show_the_committed_results_and_nothing_without_them(monkeypatch, tmp_path) -> None:
    text = "\n".join(capacity.capacity_tables())
    for title in ("## Memory", "## Egress of a zoo", "## Traces", "## Training", "## Replays"):
        assert title in text
    monkeypatch.setattr(reports, "RESULTS", tmp_path)
    assert capacity.capacity_tables() == []
