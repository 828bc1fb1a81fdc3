"""Experts over processes (gloo on loopback), with offloading beneath: as one process's, rounded."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.errors import CheckpointError
from tests.builders.forked import call_in_forks
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.served import serve

WORLD = 2
TOKENS = [[5, 9, 33, 2, 17, 41, 8], [7, 7, 1, 60, 3, 12, 30]]


def run_rank(rank: int, folder: Path, meeting: Path) -> dict[str, Any]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    options = {"init_method": f"file://{meeting}", "rank": rank, "world_size": WORLD}
    dist.init_process_group("gloo", **options)
    model = serve(folder, budget="50%", expert_parallel=True, predictor="skip")
    tokens = torch.tensor(TOKENS)
    with model.moecast, torch.no_grad():
        logits = model(tokens).logits
        made = model.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0)
        engine, stats = model.moecast.engine, model.moecast.stats()
        report = {
            "logits": logits.tolist(),
            "tokens": made.tolist(),
            "held": sorted({expert for _, expert in tuple(engine.cache.top.cache)}),
            "slots": engine.cache.num_slots,
            **{key: stats[key] for key in ("misses", "bytes_prefetched")},
        }
    dist.destroy_process_group()
    return report


@pytest.mark.slow
def test_ranks__share_the_experts_and_give_what_one_gives(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=2, num_experts=8)
    plain = plain_eager(folder)
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        logits = plain(tokens).logits
        made = plain.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0)
    meeting = tmp_path / "meeting"
    reports = call_in_forks(run_rank, range(WORLD), [folder] * WORLD, [meeting] * WORLD)
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
