"""Experts over processes (gloo on loopback), with offloading beneath: as one process's, rounded."""

import os

import pytest
import torch
import torch.distributed as dist

from runtime.errors import CheckpointError
from tests.builders.forked import call_in_forks
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.served import serve

WORLD = 2
TOKENS = [[5, 9, 33, 2, 17, 41, 8], [7, 7, 1, 60, 3, 12, 30]]


def run_rank(rank: int, folder, meeting) -> dict:
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
            "logits": logits.tolist(), "tokens": made.tolist(), "slots": engine.cache.num_slots,
            "held": sorted({expert for _, expert in tuple(engine.cache.top.cache)}),
            **{key: stats[key] for key in ("misses", "bytes_prefetched")},
        }  # fmt: skip
    dist.destroy_process_group()
    return report


@pytest.mark.slow
def test_ranks__share_the_experts_and_give_what_one_gives(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=2, num_experts=8)
    plain, tokens = plain_eager(folder), torch.tensor(TOKENS)
    with torch.no_grad():
        logits = plain(tokens).logits
        made = plain.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0)
    meeting = tmp_path / "meeting"
    reports = call_in_forks(run_rank, range(WORLD), [folder] * WORLD, [meeting] * WORLD)
    for rank, report in enumerate(reports):
        torch.testing.assert_close(torch.tensor(report["logits"]), logits)
        assert {e // 4 for e in report["held"]} == {rank}  # its own half of each layer
        # Half of its 2 x 4 slots.
        assert (report["tokens"], report["slots"]) == (made.tolist(), 4)
        assert report["misses"] > 0
    assert reports[0]["logits"] == reports[1]["logits"]
    assert sum(report["bytes_prefetched"] for report in reports) > 0


def test_ranks__alone_or_unknown_to_each_other_say_so(tmp_path):
    with pytest.raises(CheckpointError, match="torchrun"):
        serve(tiny_qwen2_moe(tmp_path / "model"), expert_parallel=True)
