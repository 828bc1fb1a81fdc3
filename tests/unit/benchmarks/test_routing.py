"""The benchmark of published routing: what a log's import and replays leave in the report."""

import json
from pathlib import Path

from benchmarks.config import RoutingConfig
from benchmarks.routing import run_routing

LOG = Path(__file__).parents[2] / "builders" / "routing_log" / "qwen3-30b-a3b.jsonl.gz"


def test_routing__starts_every_system_alike(tmp_path, capsys) -> None:
    output = tmp_path / "routing.json"
    config = RoutingConfig(
        log=LOG,
        output=output,
        run_dir=tmp_path / "run",
        num_experts=128,
        origin="a test",
        budget=["25%"],
        workers=1,
        system=["moe-infinity-sequence", "token", "moecast"],
    )
    run_routing(config)
    report = json.loads(output.read_text())
    assert (report["num_layers"], report["num_experts"], report["top_k"]) == (48, 128, 6)
    assert (report["num_requests"], report["log_origin"]) == (1, "a test")
    hits = {(row["start"], row["system"]): row["hit_rate"] for row in report["rows"]}
    systems = ("on-demand", "moe-infinity-sequence", "token", "moecast")
    assert set(hits) == {(start, one) for start in ("filled", "empty") for one in systems}
    for one in systems:
        assert hits["filled", one] > hits["empty", one]
    assert "every system starts with an empty cache" in capsys.readouterr().err
