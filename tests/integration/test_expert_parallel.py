"""Experts over processes (gloo on loopback), with offloading beneath: as one process's, rounded."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from runtime.errors import CheckpointError
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.processes import run_python
from tests.builders.served import serve

TOKENS = [[5, 9, 33, 2, 17, 41, 8], [7, 7, 1, 60, 3, 12, 30]]
RANK = """
import json, sys
import torch
import torch.distributed as dist
from tests.builders.served import serve
rank, world, folder, meeting, budget, tokens, out = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank),
                        world_size=int(world))
model = serve(folder, budget=budget, expert_parallel=True, predictor="skip")
tokens = torch.tensor(json.loads(tokens))
with model.moecast, torch.no_grad():
    logits = model(tokens).logits
    made = model.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0)
    engine = model.moecast.engine
    held = sorted({e for _, e in tuple(engine.cache.top.cache)})
    report = {
        "logits": logits.tolist(),
        "tokens": made.tolist(),
        "held": held,
        "slots": engine.cache.num_slots,
        **{key: model.moecast.stats()[key] for key in ("requests", "misses", "bytes_prefetched")},
    }
    open(out, "w").write(json.dumps(report))
dist.destroy_process_group()
"""


def run_ranks(folder: Path, tmp_path: Path, world: int, budget: str) -> list[dict]:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    def run_rank(rank: int) -> dict:
        out = tmp_path / f"rank{rank}.json"
        given = (rank, world, folder, tmp_path / "meeting", budget, json.dumps(TOKENS), out)
        run_python("-c", RANK, *given, environment=environment, timeout=500)
        return json.loads(out.read_text())

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run_rank, range(world)))


@pytest.mark.slow
def test_ranks__share_the_experts_and_give_what_one_gives(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=2, num_experts=8)
    plain = plain_eager(folder)
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        logits = plain(tokens).logits
        made = plain.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0)
    reports = run_ranks(folder, tmp_path, 2, "50%")
    for rank, report in enumerate(reports):
        torch.testing.assert_close(torch.tensor(report["logits"]), logits)
        assert report["tokens"] == made.tolist()
        assert report["held"]
        assert all(e // 4 == rank for e in report["held"])  # its own half of each layer
        assert report["slots"] == 4  # half of its 2 x 4
        assert report["misses"] > 0
    assert reports[0]["logits"] == reports[1]["logits"]
    assert sum(report["bytes_prefetched"] for report in reports) > 0


def test_ranks__alone_or_unknown_to_each_other_say_so(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model")
    with pytest.raises(CheckpointError, match="torchrun"):
        serve(folder, expert_parallel=True)
