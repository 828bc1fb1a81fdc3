"""The parts of the comparison with peers that can be checked without the peers."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.environments import BuildFailed, SourceBuild, edit_source
from benchmarks.peers.fused import write_fused
from benchmarks.peers.limit import BLOCK, CachedFile, FileMapping, MemoryLimiter
from benchmarks.peers.rows import (
    FailedPeer,
    PeerAnswer,
    PeerKey,
    PeerRow,
    PeerRun,
    first_difference,
    summarize_runs,
)
from benchmarks.peers.run import add_ratios
from tests.builders.models import tiny_qwen2_moe

LAYERS, EXPERTS = 2, 6


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_qwen2_moe(tmp_path / "model", num_layers=LAYERS, num_experts=EXPERTS)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    every: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        every |= load_file(path)
    return every


def test_fused__holds_the_same_values_with_gate_before_up(checkpoint: Path, tmp_path: Path) -> None:
    write_fused(checkpoint, tmp_path / "fused")
    ours, theirs = weights(tmp_path / "fused"), weights(checkpoint)
    stem = "model.layers.1.mlp.experts"
    for expert in range(EXPERTS):
        gate, up, down = (
            theirs[f"{stem}.{expert}.{part}_proj.weight"].float() for part in ("gate", "up", "down")
        )
        assert torch.equal(ours[f"{stem}.gate_up_proj"][expert], torch.cat([gate, up]))
        assert torch.equal(ours[f"{stem}.down_proj"][expert], down)
    others = {key for key in theirs if ".experts." not in key}
    assert others <= set(ours)
    assert all(torch.equal(ours[key], theirs[key].float()) for key in others)
    assert len(ours) == len(others) + 2 * LAYERS


def test_gguf__holds_every_tensor_and_size_that_llama_cpp_reads(
    checkpoint: Path, tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf", reason="pip install 'moecast[dev]' includes gguf")
    from benchmarks.peers.gguf_file import write_gguf

    config = json.loads((checkpoint / "config.json").read_text())
    pieces = {f"p{number}": number for number in range(config["vocab_size"] - 1)}
    tokenizer = {
        "model": {"vocab": pieces, "merges": [["p", "1"], "p 2"]},
        "added_tokens": [{"id": 0, "content": "<|end|>"}],
    }
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    config |= {"bos_token_id": 0, "eos_token_id": 0}
    (checkpoint / "config.json").write_text(json.dumps(config))
    write_fused(checkpoint, tmp_path / "fused")
    write_gguf(tmp_path / "fused", tmp_path / "model.gguf")

    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    theirs = {key: value.float().numpy() for key, value in weights(checkpoint).items()}
    stem = "model.layers.1.mlp"
    for ours, part in (("gate", "gate"), ("up", "up"), ("down", "down")):
        for expert in range(EXPERTS):
            value = theirs[f"{stem}.experts.{expert}.{part}_proj.weight"]
            np.testing.assert_array_equal(found[f"blk.1.ffn_{ours}_exps.weight"][expert], value)
    for name, key in {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
        "blk.0.attn_q.bias": "model.layers.0.self_attn.q_proj.bias",
        "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
        "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "blk.1.ffn_gate_inp.weight": f"{stem}.gate.weight",
        "blk.1.ffn_up_shexp.weight": f"{stem}.shared_expert.up_proj.weight",
    }.items():
        np.testing.assert_array_equal(found[name], theirs[key])
    gate = theirs[f"{stem}.shared_expert_gate.weight"]
    np.testing.assert_array_equal(found["blk.1.ffn_gate_inp_shexp.weight"], gate.reshape(-1))
    output = theirs.get("lm_head.weight", theirs["model.embed_tokens.weight"])
    np.testing.assert_array_equal(found["output.weight"], output)

    def value(key: str) -> object:
        return reader.fields[key].contents()

    assert value("general.architecture") == "qwen2moe"
    assert value("qwen2moe.block_count") == LAYERS
    assert value("qwen2moe.expert_count") == EXPERTS
    assert value("qwen2moe.expert_used_count") == config["num_experts_per_tok"]
    assert value("qwen2moe.expert_feed_forward_length") == config["moe_intermediate_size"]
    assert value("tokenizer.ggml.merges") == ["p 1", "p 2"]
    tokens = value("tokenizer.ggml.tokens")
    last = config["vocab_size"] - 1
    assert isinstance(tokens, list)
    assert (tokens[0], tokens[1], tokens[last]) == ("<|end|>", "p1", f"[unused{last}]")
    kinds = [int(kind) for kind in value("tokenizer.ggml.token_type")]
    assert (kinds[0], kinds[1], kinds[last]) == (3, 1, 5)  # control, normal, unused


def test_first_difference__counts_short_answers_as_far_as_they_go() -> None:
    expected = [[1, 2, 3], [4, 5, 6]]
    assert first_difference([[1, 2], [4, 5, 6]], expected) == "yes"
    assert first_difference([[1, 2, 3], [4, 9]], expected) == "prompt 1, token 1 of 3"


KEY = PeerKey(peer="peer", how="how", budget="25%", budget_bytes=1, limit_bytes=2)


def peer_run(step: float) -> PeerRun:
    answer = PeerAnswer(
        tokens=[7, 8, 9], seconds=[1.0, 1.0 + step, 1.0 + 3 * step], read_bytes=[100, 110, 140]
    )
    return PeerRun(
        versions={"peer": "1"},
        load_seconds=1.0,
        answers=[answer],
        peak_resident_bytes=4,
        peak_anonymous_bytes=1,
        peak_cached_bytes=2,
        peak_charged_bytes=3,
        mean_charged_bytes=3.0,
        limiter_busy_seconds=0.0,
    )


def test_summary__takes_medians_and_bytes_after_the_first_token() -> None:
    row = summarize_runs(KEY, [peer_run(0.1), peer_run(0.2), peer_run(0.4)], [[7, 8, 9]])
    assert row.tokens_per_second == pytest.approx(2 / 0.6)
    assert row.tpot_seconds == pytest.approx((0.2 + 0.4) / 2)
    assert row.ttft_seconds == 1.0
    assert row.read_bytes_per_token == 20
    assert row.tokens_as_transformers == "yes"


def test_ratios__are_relative_to_the_reference_at_the_same_budget() -> None:
    slow = summarize_runs(replace(KEY, peer="accelerate"), [peer_run(0.4)], [[7, 8, 9]])
    fast = summarize_runs(KEY, [peer_run(0.1)], [[7, 8, 9]])
    other = replace(fast, budget="50%")
    failed = FailedPeer(**vars(KEY), cannot_run="why")
    rows = add_ratios([slow, fast, other, failed])
    ratios = [row.decode_over_accelerate for row in rows if isinstance(row, PeerRow)]
    assert ratios == [1.0, pytest.approx(4.0), None]


def test_mapping__gives_the_part_of_a_file_that_it_holds() -> None:
    mapping = FileMapping(inode=1, start=0x10000, end=0x14000, offset=0x2000)
    part = mapping.part(0x1000, 0x2000)
    assert part is not None
    assert (part.base, part.length) == (0x10000, 0x1000)
    assert mapping.part(0x6000, 0x1000) is None


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
def test_limiter__drops_what_a_process_maps_beyond_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.write(os.urandom(112 * BLOCK))
        os.fsync(file.fileno())
    watched = CachedFile(path)
    try:
        watched.cached_bytes()
    except OSError as error:
        pytest.skip(str(error))
    end = tmp_path / "end"
    process = subprocess.Popen([sys.executable, "-c", READS_ALL, str(path), str(end)])
    limiter = MemoryLimiter(process, [path], limit_bytes=40 * BLOCK)

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
    assert watched.cached_bytes() < 112 * BLOCK
    watched.close()


def test_limiter__kills_what_needs_more_than_its_limit_for_itself(tmp_path: Path) -> None:
    grows = "import time; data = bytearray(b'1' * (96 << 20)); time.sleep(400)"
    process = subprocess.Popen([sys.executable, "-c", grows])
    limiter = MemoryLimiter(process, [], limit_bytes=64 * BLOCK)
    limiter.watch(timeout_seconds=240)
    assert limiter.was_killed


def test_edit_source__refuses_a_pattern_that_is_not_unique(
    tmp_path: Path,
) -> None:
    tree = tmp_path / "package-1"
    tree.mkdir()
    (tree / "graph.cpp").write_text("build(SILU, false); build(SILU, false);")
    subprocess.run(["tar", "czf", "package-1.tar.gz", "package-1"], cwd=tmp_path, check=True)
    twice = SourceBuild("package==1", {"graph.cpp": ("SILU, false", "SILU, true")})
    with pytest.raises(BuildFailed, match="2 times in graph.cpp"):
        edit_source(tmp_path, twice)
    once = SourceBuild("package==1", {"graph.cpp": ("build(SILU, false); b", "b")})
    assert (edit_source(tmp_path, once) / "graph.cpp").read_text() == "build(SILU, false);"
