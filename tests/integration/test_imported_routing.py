"""A published routing log: imported by the command, replayed under the systems that need nothing
but routing."""

import json

import numpy as np
import pytest

from collect.traces import Trace
from configs.program import run_program
from runtime.config import SystemConfig
from runtime.sim.replay import replay
from tests.builders.simulated import toy_machine

LAYERS, EXPERTS, TOP_K, REQUESTS, TOKENS = 3, 8, 2, 4, 30


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Requests that each prefer other experts, as JSON lines."""
    folder = tmp_path_factory.mktemp("log")
    rng = np.random.default_rng(0)
    lines = []
    for request in range(REQUESTS):
        favourites = rng.dirichlet(np.full(EXPERTS, 0.4), size=LAYERS) + 1e-6
        favourites /= favourites.sum(axis=1, keepdims=True)
        for position in range(TOKENS):
            for layer in range(LAYERS):
                chosen = rng.choice(EXPERTS, size=TOP_K, replace=False, p=favourites[layer])
                where = {"request": f"r{request}", "position": position, "layer": layer}
                lines.append(where | {"experts": chosen.tolist()})
    log = folder / "log.jsonl"
    log.write_text("\n".join(map(json.dumps, lines)))
    output = folder / "trace"
    options = [f"source={log}", f"output={output}", f"run_dir={folder / 'run'}"]
    assert run_program("collect", ["import", *options]) == 0
    return Trace.open(output)


def lru_hits(trace: Trace, slots_each: int) -> int:
    """The plainest cache there is: a list for each layer."""
    hits, kept = 0, [[] for _ in range(LAYERS)]
    columns = [np.asarray(trace.column("experts", layer)) for layer in range(LAYERS)]
    for row in range(trace.num_tokens):
        for layer in range(LAYERS):
            cache, chosen = kept[layer], sorted(columns[layer][row].tolist())
            hits += sum(e in cache for e in chosen)
            for e in sorted(chosen, key=lambda e: e not in cache):
                if e in cache:
                    cache.remove(e)
                cache.append(e)
                del cache[:-slots_each]
    return hits


def test_imported_routing__misses_what_a_plain_cache_misses(trace: Trace) -> None:
    assert trace.spec.num_layers == LAYERS
    system = SystemConfig(prefetch=False)
    stats = replay(
        trace.steps(), None, spec=trace.spec, system=system, hardware=toy_machine(), budget_slots=12
    )
    assert stats.total.requests == REQUESTS * TOKENS * LAYERS * TOP_K
    assert stats.total.hits == lru_hits(trace, 4)
    assert len(stats.tpot_seconds) == REQUESTS * TOKENS
