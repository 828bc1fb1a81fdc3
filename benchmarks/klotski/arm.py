"""One arm in a process of its own: `python -m benchmarks.klotski.arm REQUEST.json REPORT.json`."""

import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ARMS = ("on-demand", "simple", "multi", "hot", "klotski")
"""Single batches on demand; table 3's rows: whole next layers in single batches, the same in
groups, only hot experts, and in klotski's order."""


@dataclass
class Request:
    model: str
    arm: str
    budget: str
    batch_size: int
    n: int
    num_batches: int
    prompt_tokens: int
    new_tokens: int
    threads: int
    kv_budget: str | None = None
    store: str | None = None


def system_of(arm: str) -> Any:
    """From `configs/system`."""
    from configs.compose import compose_typed
    from runtime.generation.batch.memory_plan import with_whole_layer_buffers

    name = "on-demand" if arm == "on-demand" else "klotski"
    config, _ = compose_typed("batch", [f"system={name}", "input=-", "output=-"])
    system = with_whole_layer_buffers(config.system)
    if arm in ("simple", "multi"):
        # Every expert of the next layer, by id, as offloading for dense models does.
        return replace(system, predictor="dependency", reordered=False, hot_first=False)
    if arm == "hot":
        return replace(system, reordered=False, hot_first=False)
    return system


def run(request: Request) -> dict[str, Any]:
    import torch

    import runtime
    from benchmarks.klotski.requests import prompts_of
    from benchmarks.klotski.watch import Memory, Named, reads, shares, timeline
    from runtime.config import ModelConfig
    from runtime.generation.batch.batching import make_batches
    from runtime.generation.batch.config import GroupConfig
    from runtime.generation.batch.memory_plan import make_kv_caches, parse_kv_budget
    from runtime.generation.batch.micro_batches import run_micro_batches
    from runtime.generation.batch.result_journal import BatchResult

    torch.set_num_threads(request.threads)
    model_path = Path(request.model)
    prompts = prompts_of(
        model_path,
        request.batch_size * request.num_batches,
        num_tokens=request.prompt_tokens,
        new_tokens=request.new_tokens,
    )
    batches = make_batches(prompts, request.batch_size)
    model = runtime.load(
        ModelConfig(name=model_path.name, id=request.model, dtype="float32"),
        system=system_of(request.arm),
        budget=request.budget,
        store=request.store,
    )
    model.generation_config.eos_token_id = None  # every row has all its tokens
    config = GroupConfig(kv_budget=request.kv_budget)
    found: dict[int, list[int]] = {}
    spans = Named()

    def emit(result: BatchResult) -> None:
        assert isinstance(result.id, int)
        found[result.id] = result.tokens

    with model.moecast as handle:
        weights = sum(one.numel() * one.element_size() for one in model.parameters())
        handle.engine.tell(spans)
        caches = make_kv_caches(model, config, parse_kv_budget(config, model.device))
        start = time.perf_counter()
        with Memory(model) as memory:
            ran = run_micro_batches(model, batches, n=request.n, caches=caches, emit=emit)
        seconds = time.perf_counter() - start
        caches.close()
        stats = handle.stats()
        middle = handle.spec.num_layers // 2
        return {
            "tokens": ran.num_tokens,
            "seconds": seconds,
            "tokens_per_second": ran.num_tokens / seconds,
            "steps": [round(end - begin, 4) for begin, end in spans.steps],
            "steady": shares(spans),
            "reads_per_step": reads(spans),
            "bytes_moved": stats["bytes_moved"],
            "hit_rate": stats["hit_rate"],
            "arena_bytes": stats["arena_bytes"],
            "weights_bytes": weights,
            "peak_memory_bytes": stats["peak_memory_bytes"],
            "memory": memory.thinned(),
            "timeline": timeline(spans, layers=(middle, middle + 1)),
            "answers": [found[one.id] for one in prompts],
        }


def main(request: str, report: str) -> None:
    asked = Request(**json.loads(Path(request).read_text()))
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    Path(report).write_text(json.dumps(run(asked)))


if __name__ == "__main__":
    main(*sys.argv[1:])
