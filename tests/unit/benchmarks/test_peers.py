"""The parts of the comparison with peers that can be checked without the peers."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks import random_model
from benchmarks.config import RandomConfig
from benchmarks.environments import BuildFailed, SourceBuild, edit_source
from benchmarks.peers import rows, run
from benchmarks.peers.config import PeersConfig
from benchmarks.peers.fused import write_fused
from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.limit import BLOCK, CachedFile, MemoryLimiter
from benchmarks.peers.peers import WORKERS
from benchmarks.peers.read_ahead import check_settable, read_ahead, setting_file
from benchmarks.peers.runner import PeerRunner, Questions
from benchmarks.peers.weights import ModelWeights, WeightLayout, weight_bytes
from benchmarks.process import ProcessFailed
from benchmarks.reports import Document
from benchmarks.tables.peers import describe_part
from predictors.errors import MoecastError
from tests.builders.families.build import tiny_config
from tests.builders.families.table import FAMILIES
from tests.builders.models import read_weights, set_fields, tiny_qwen2_moe
from tests.builders.page_cache import uncached_zeros

LAYERS, EXPERTS, LAST_TOKEN = 2, 6, 63


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_qwen2_moe(tmp_path / "model", num_layers=LAYERS, num_experts=EXPERTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused__holds_the_same_values_with_gate_before_up(checkpoint, tmp_path, dtype):
    write_fused(checkpoint, tmp_path / "fused", dtype)
    ours, theirs = read_weights(tmp_path / "fused"), read_weights(checkpoint)
    stem = "model.layers.1.mlp.experts"
    for expert in range(EXPERTS):
        keys = (f"{stem}.{expert}.{part}_proj.weight" for part in ("gate", "up", "down"))
        gate, up, down = (theirs[key].to(dtype) for key in keys)
        assert torch.equal(ours[f"{stem}.gate_up_proj"][expert], torch.cat([gate, up]))
        assert torch.equal(ours[f"{stem}.down_proj"][expert], down)
    others = {key for key in theirs if ".experts." not in key}
    assert all(torch.equal(ours[key], theirs[key].to(dtype)) for key in others)
    assert len(ours) == len(others) + 2 * LAYERS
    experts, rest = weight_bytes(checkpoint, dtype)
    assert experts == sum(value.nbytes for key, value in ours.items() if ".experts." in key)
    assert experts + rest == sum(value.nbytes for value in ours.values())


def add_tokenizer(folder: Path) -> None:
    """Adds a tokenizer without a piece for the last token."""
    set_fields(folder, bos_token_id=0, eos_token_id=0)
    pieces = {f"p{number}": number for number in range(LAST_TOKEN)}
    model = {"vocab": pieces, "merges": [["p", "1"], "p 2"]}
    tokenizer = {"model": model, "added_tokens": [{"id": 0, "content": "<|end|>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def test_gguf__holds_every_tensor_and_size_that_llama_cpp_reads(checkpoint, tmp_path):
    add_tokenizer(checkpoint)
    write_gguf(checkpoint, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    theirs = {key: value.float().numpy() for key, value in read_weights(checkpoint).items()}
    stem = "model.layers.1.mlp"
    for part in ("gate", "up", "down"):
        for expert in range(EXPERTS):
            value = theirs[f"{stem}.experts.{expert}.{part}_proj.weight"]
            np.testing.assert_array_equal(found[f"blk.1.ffn_{part}_exps.weight"][expert], value)
    for name, key in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_q.bias": "model.layers.0.self_attn.q_proj.bias",
        "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "blk.1.ffn_gate_inp.weight": f"{stem}.gate.weight",
        "blk.1.ffn_up_shexp.weight": f"{stem}.shared_expert.up_proj.weight",
        "output.weight": "lm_head.weight",
    }.items():
        np.testing.assert_array_equal(found[name], theirs[key])
    gate = theirs[f"{stem}.shared_expert_gate.weight"]
    np.testing.assert_array_equal(found["blk.1.ffn_gate_inp_shexp.weight"], gate.reshape(-1))

    values = {key: field.contents() for key, field in reader.fields.items()}
    expected = {
        "general.architecture": "qwen2moe",
        "qwen2moe.block_count": LAYERS,
        "qwen2moe.expert_count": EXPERTS,
        "qwen2moe.expert_used_count": 2,
        "qwen2moe.expert_feed_forward_length": 16,
        "tokenizer.ggml.merges": ["p 1", "p 2"],
    }
    assert {key: values[key] for key in expected} == expected
    tokens, kinds = (values[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    assert (tokens[0], tokens[1], tokens[LAST_TOKEN]) == ("<|end|>", "p1", "[unused63]")
    assert (kinds[0], kinds[1], kinds[LAST_TOKEN]) == (3, 1, 5)  # control, normal, unused


def test_gguf__of_qwen3_has_matrices_in_bfloat16_and_routers_in_float32(tmp_path, monkeypatch):
    folder = tiny_random_model(tmp_path / "model", monkeypatch)
    write_gguf(folder, tmp_path / "model.gguf", torch.bfloat16)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    theirs = read_weights(folder)
    assert len(tensors) == 3 + LAYERS * 12
    up = theirs["model.layers.1.mlp.experts.5.up_proj.weight"]
    ours = tensors["blk.1.ffn_up_exps.weight"]
    assert ours.tensor_type == gguf.GGMLQuantizationType.BF16
    bits = np.ascontiguousarray(ours.data).view(np.uint16).reshape(EXPERTS, *up.shape)[5]
    np.testing.assert_array_equal(bits, up.view(torch.uint16).numpy())
    router = tensors["blk.1.ffn_gate_inp.weight"]
    assert router.tensor_type == gguf.GGMLQuantizationType.F32
    gate = theirs["model.layers.1.mlp.gate.weight"].float().numpy()
    np.testing.assert_array_equal(router.data, gate)
    sizes = {"expert_count": EXPERTS, "expert_used_count": 2, "attention.key_length": 8}
    assert sizes == {name: reader.fields[f"qwen3moe.{name}"].contents() for name in sizes}


def test_gguf__refuses_other_models(checkpoint: Path, tmp_path: Path) -> None:
    set_fields(checkpoint, model_type="mixtral")
    with pytest.raises(MoecastError, match="mixtral.*qwen2_moe, qwen3_moe"):
        write_gguf(checkpoint, tmp_path / "model.gguf")


def tiny_random_model(folder: Path, monkeypatch, *, routing: Path | None = None) -> Path:
    """Runs `python -m benchmarks random` with a configuration of few weights."""
    sizes = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "vocab_size": LAST_TOKEN + 1}
    tiny = tiny_config(FAMILIES["qwen3_moe"].changed(**sizes, head_dim=8, dtype="bfloat16"))
    monkeypatch.setattr(random_model, "scaled_config", lambda *_, **__: tiny)
    random_model.run_random(RandomConfig(output=folder, num_layers=LAYERS, routing=routing))
    add_tokenizer(folder)
    return folder


def test_random_model__refuses_what_is_there_and_no_layers(tmp_path: Path) -> None:
    with pytest.raises(MoecastError, match="exists"):
        random_model.run_random(RandomConfig(output=tmp_path))
    with pytest.raises(MoecastError, match="num_layers=0"):
        random_model.run_random(RandomConfig(output=tmp_path / "none", num_layers=0))


def test_random_model__repeats_the_tokens_and_experts_of_a_log(tmp_path: Path, monkeypatch) -> None:
    log, num_tokens = tmp_path / "log.jsonl", 12
    draw = partial(np.random.default_rng(0).choice, EXPERTS, 2, replace=False)
    chosen = [[draw().tolist() for _ in range(LAYERS + 2)] for _ in range(num_tokens)]
    taken = [(at, layer, one) for at, own in enumerate(chosen) for layer, one in enumerate(own)]
    lines = [dict(zip(("position", "layer", "experts"), one, strict=True)) for one in taken]
    log.write_text("\n".join(map(json.dumps, lines)))
    folder = tiny_random_model(tmp_path / "model", monkeypatch, routing=log)
    ids = json.loads((folder / "routed_tokens.json").read_text())
    options = {"dtype": torch.bfloat16, "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    routed: list[list[list[int]]] = [[] for _ in range(LAYERS)]

    def note(to: list[list[int]], _module, _args, output) -> None:
        to.extend(sorted(row) for row in output[2].tolist())

    for block, to in zip(model.model.layers, routed, strict=True):
        block.mlp.gate.register_forward_hook(partial(note, to))
    greedy = {"max_new_tokens": num_tokens - 4, "do_sample": False, "eos_token_id": None}
    output = model.generate(torch.tensor([ids[:4]]), **greedy)
    assert output[0].tolist() == ids
    # Consecutive layers from the middle.
    expected = [[sorted(layers[1 + layer]) for layers in chosen[:-1]] for layer in range(LAYERS)]
    assert routed == expected
    questions = run.make_questions(PeersConfig(model=folder, max_new_tokens=2), None)
    assert (questions.warm_up, questions.prompts) == ([ids[:3]], [ids[3:6], ids[6:9], ids[9:]])
    longer = run.make_questions(PeersConfig(model=folder, context=5), None).prompts
    assert [prompt[5:] for prompt in longer] == questions.prompts
    assert set(longer[0][:5]) <= set(ids)


def test_first_difference__counts_short_answers_as_far_as_they_go() -> None:
    expected = [[1, 2, 3], [4, 5, 6]]
    assert rows.first_difference([[1, 2], [4, 5, 6]], expected) == "yes"
    assert rows.first_difference([[1, 2, 3], [4, 9]], expected) == "prompt 1, token 1 of 3"


KEY = rows.PeerKey(
    peer="peer", how="how", budget="25%", budget_bytes=1, limit_bytes=2, reserved_bytes=1,
    threads=2, read_ahead_kib=None,
)  # fmt: skip


def peer_run(step: float) -> rows.PeerRun:
    times = [1.0, 1.0 + step, 1.0 + 3 * step]
    answer = rows.PeerAnswer(tokens=[7, 8, 9], seconds=times, read_bytes=[100, 110, 140])
    return rows.PeerRun(
        versions={"peer": "1"}, load_seconds=1.0, answers=[answer], peak_resident_bytes=4,
        peak_anonymous_bytes=1, peak_cached_bytes=2, peak_charged_bytes=3, mean_charged_bytes=3.0,
        limiter_busy_seconds=0.0,
    )  # fmt: skip


def test_summary__takes_medians_and_bytes_after_the_first_token() -> None:
    row = rows.summarize_runs(KEY, [peer_run(0.1), peer_run(0.2), peer_run(0.4)], [[7, 8, 9]])
    assert row.tokens_per_second == pytest.approx(2 / 0.6)
    assert (row.tpot_seconds, row.ttft_seconds) == (pytest.approx((0.2 + 0.4) / 2), 1.0)
    assert (row.read_bytes_per_token, row.tokens_as_transformers) == (20, "yes")
    assert rows.summarize_runs(KEY, [peer_run(0.1)], None).tokens_as_transformers is None


def test_ratios__are_relative_to_the_references_fastest_row_at_the_same_budget() -> None:
    slow = rows.summarize_runs(replace(KEY, peer="accelerate"), [peer_run(0.4)], [[7, 8, 9]])
    slowest = rows.summarize_runs(replace(KEY, peer="accelerate", threads=1), [peer_run(0.8)], None)
    fast = rows.summarize_runs(KEY, [peer_run(0.1)], [[7, 8, 9]])
    other = replace(fast, budget="50%")
    failed = rows.FailedPeer(**vars(KEY), cannot_run="why")
    made = rows.add_ratios([slow, slowest, fast, other, failed], ["accelerate", "other"])
    ratios = [row.over_reference for row in made if isinstance(row, rows.PeerRow)]
    assert ratios == [1.0, pytest.approx(0.5), pytest.approx(4.0), None]


OWN, SLOW = 8192, 128


def keys_of(*budgets: str, peer: str, context: int = 0) -> list[rows.PeerKey]:
    settings = {"budget": list(budgets), "peer": [peer], "threads": [1, 2], "context": context}
    config = PeersConfig(model=Path("model"), **settings)
    chosen, plan = run.choose_peers(config), run.ReadAheadPlan(Path("setting"), OWN, (512, SLOW))
    return run.list_keys(config, chosen, plan, experts_bytes=400, others_bytes=30)


def test_keys__read_ahead_is_varied_for_programs_that_map_what_does_not_fit() -> None:
    mapped = keys_of("25%", "100%", peer="llama-cpp")
    settings = [(key.budget, key.threads, key.read_ahead_kib) for key in mapped]
    expected = [("25%", threads, ahead) for threads in (1, 2) for ahead in (512, SLOW)]
    assert settings == [*expected, ("100%", 1, OWN), ("100%", 2, OWN)]
    assert {key.read_ahead_kib for key in keys_of("25%", peer="moecast")} == {None}
    assert {key.budget for key in keys_of("25%", "100%", peer="llama-cpp-in-memory")} == {"100%"}


def test_keys__memory_is_the_same_for_all_and_reserved_where_not_all_fits() -> None:
    quarter, full = keys_of("25%", "100%", peer="on-demand")[::2]
    assert (quarter.budget_bytes, full.budget_bytes) == (100, 400)
    assert full.limit_bytes - quarter.limit_bytes == 300
    assert (quarter.reserved_bytes, full.reserved_bytes) == (400 << 20, 0)
    assert quarter.limit_bytes == quarter.reserved_bytes + 100 + 30
    longer = keys_of("25%", peer="on-demand", context=1024)[0]
    assert longer.reserved_bytes - quarter.reserved_bytes == 128 << 20
    assert longer.limit_bytes - quarter.limit_bytes == 128 << 20


WRONG_SETTINGS = [
    ({"peer": ["llama"]}, "unknown peer 'llama'. Did you mean 'llama-cpp'"),
    ({"format": ["int3"]}, "unknown format 'int3'.*bfloat16, float32, q4_0, q4_K_M, q8_0"),
    ({"format": ["q4_0"], "peer": ["airllm"]}, r"format=q4_0: .*\(airllm: float32\)"),
    ({"threads": [2, 0]}, r"threads=\[2, 0\]: must be at least 1"),
    ({"threads": []}, "at least one number"),
    ({"read_ahead": [-1]}, r"read_ahead=\[-1\]: must be at least 0"),
    ({"warm_ups": -1}, "warm_ups=-1: must be at least 0"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG_SETTINGS)
def test_settings__name_what_is_allowed(settings: dict, message: str) -> None:
    with pytest.raises(MoecastError, match=message):
        run.choose_peers(PeersConfig(model=Path("model"), **settings))


def test_gguf__is_not_written_for_a_quantiser_that_is_missing(checkpoint: Path, tmp_path: Path):
    weights = ModelWeights(checkpoint, tmp_path / "work", tmp_path / "none", "q4_0")
    with pytest.raises(ProcessFailed, match="environments name=llama-cpp"):
        weights.write(WeightLayout.GGUF)
    assert not (tmp_path / "work").exists()


def test_read_ahead__is_restored_after_a_failure(tmp_path: Path) -> None:
    setting = tmp_path / "read_ahead_kb"
    setting.write_text("8192")
    with pytest.raises(ValueError, match="128"), read_ahead(setting, 128):
        raise ValueError(setting.read_text())
    assert setting.read_text() == "8192"
    with pytest.raises(SystemExit), read_ahead(setting, 128):
        signal.raise_signal(signal.SIGTERM)
    assert setting.read_text() == "8192"
    check_settable(setting)
    with pytest.raises(MoecastError, match="run as root, or with read_ahead="):
        check_settable(tmp_path)
    with pytest.raises(MoecastError, match="/proc is on no disk"):
        setting_file(Path("/proc"))


ROWS = [
    rows.summarize_runs(replace(KEY, read_ahead_kib=8192), [peer_run(0.1)], None),
    rows.FailedPeer(**vars(KEY), cannot_run="no memory"),
]


def write_rows(config: PeersConfig, name: str) -> Document:
    sizes = {"experts_bytes": 1, "prompts": [1], "new_tokens": 3, "reference_peers": ["llama-cpp"]}
    return run.write_format(config, name, rows=ROWS, **sizes)


def test_finished_run__is_found_by_what_it_depends_on(tmp_path: Path) -> None:
    def find(key: rows.PeerKey, threads: int) -> Path:
        weights = ModelWeights(Path("inflated"), tmp_path, tmp_path, "q4_0")
        return run.finished_run(PeerRunner(weights), key, Questions([[1]], 2, 3.0, threads), 1)

    assert find(KEY, 1) == find(KEY, 1)
    assert len({find(KEY, 1), find(KEY, 2), find(replace(KEY, budget_bytes=9), 1)}) == 3
    find(KEY, 1).touch()
    output = tmp_path / "peers.json"
    write_rows(PeersConfig(model=Path("inflated"), output=output, work=tmp_path), "q4_0")
    assert not find(KEY, 1).exists()


def test_part__has_a_row_for_each_program_or_its_reason(tmp_path: Path) -> None:
    config = PeersConfig(model=Path("inflated"), output=tmp_path / "peers.json")
    lines = describe_part(write_rows(config, "int4"))
    after = "\n".join(describe_part(write_rows(replace(config, context=4096), "int4")))
    assert "int4, after 4,096 tokens of context; experts" in after
    assert f"| `peer` | 6.67, the first after {ROWS[0].ttft_seconds:.1f} s |" in after
    parts = ["inflated int4", "inflated int4 after 4096 tokens"]
    assert list(json.loads(config.output.read_text())) == parts
    assert "| `peer` | 6.67 |" in lines
    assert "`peer` did not run at 25%: no memory." in lines


def test_device_map__keeps_all_layers_where_all_fit(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(WORKERS))
    from with_accelerate import device_map

    sizes = {"num_hidden_layers": 3, "hidden_size": 8, "moe_intermediate_size": 4}
    config = Qwen3MoeConfig(**sizes, num_experts=2)
    layer = 3 * 8 * 4 * 2 * torch.bfloat16.itemsize

    def on_disk(budget: int) -> list[str]:
        places = device_map(config, budget, torch.bfloat16)
        return [place for place in places if places[place] == "disk"]

    assert on_disk(3 * layer) == []
    assert on_disk(3 * layer - 1) == [f"model.layers.{n}.mlp.experts" for n in (1, 2)]


READS_ALL = """
import mmap, sys, time
from pathlib import Path
file = open(sys.argv[1], "rb")
pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
while not Path(sys.argv[2]).exists():
    total = sum(pages[::4096])
    time.sleep(0.05)
"""


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="dropping others' pages: root")
@pytest.mark.parametrize("reserved", [0, 60 * BLOCK])
def test_limiter__drops_what_a_process_maps_beyond_its_limit(tmp_path: Path, reserved: int) -> None:
    path = uncached_zeros(tmp_path / "weights", 112 * BLOCK)
    watched = CachedFile(path)
    try:
        watched.cached_bytes()
    except OSError as error:
        pytest.skip(str(error))
    end = tmp_path / "end"
    process = subprocess.Popen([sys.executable, "-c", READS_ALL, str(path), str(end)])
    limiter = MemoryLimiter(process, [path], 40 * BLOCK + reserved, reserved)

    def end_when_dropped() -> None:
        # All of it is read, again and again; it is held to less but for what comes between looks.
        while limiter.dropped_bytes < 20 * BLOCK and process.poll() is None:
            time.sleep(0.01)
        end.touch()

    ending = threading.Thread(target=end_when_dropped)
    ending.start()
    limiter.watch(timeout_seconds=240)
    ending.join()
    assert process.returncode == 0
    assert limiter.dropped_bytes >= 20 * BLOCK
    watched.close()


def test_limiter__kills_what_needs_more_than_its_limit_for_itself(tmp_path: Path) -> None:
    grows = "import time; data = bytearray(b'1' * (96 << 20)); time.sleep(400)"
    process = subprocess.Popen([sys.executable, "-c", grows])
    limiter = MemoryLimiter(process, [], limit_bytes=64 * BLOCK)
    limiter.watch(timeout_seconds=240)
    assert limiter.was_killed


def test_edit_source__refuses_a_pattern_that_is_not_unique(tmp_path: Path) -> None:
    tree = tmp_path / "package-1"
    tree.mkdir()
    (tree / "graph.cpp").write_text("build(SILU, false); build(SILU, false);")
    subprocess.run(["tar", "czf", "package-1.tar.gz", "package-1"], cwd=tmp_path, check=True)
    twice = SourceBuild("package==1", {"graph.cpp": ("SILU, false", "SILU, true")})
    with pytest.raises(BuildFailed, match="2 times in graph.cpp"):
        edit_source(tmp_path, twice)
    once = SourceBuild("package==1", {"graph.cpp": ("build(SILU, false); b", "b")})
    assert (edit_source(tmp_path, once) / "graph.cpp").read_text() == "build(SILU, false);"
