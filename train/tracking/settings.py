"""The settings that a tracking server keeps of a run."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from collect.traces import Trace
from runtime.sim.hardware import Hardware
from runtime.tools.report.provenance import RUN_FILE, describe_origin
from train.config import TrainConfig


def resolved_settings(
    config: TrainConfig, trace: Trace, machines: Iterable[Hardware] = ()
) -> dict[str, Any]:
    """Return the whole configuration, and the trace, model and machines that it resolved to.

    The configuration is that of run.json, which has no secrets; one that no command composed has
    none.
    """
    assert config.run_dir is not None
    path = config.run_dir / RUN_FILE
    if path.is_file():
        options = json.loads(path.read_text())["config"]
    else:
        options = json.loads(json.dumps(asdict(config), default=str))
    return {
        **options,
        "base_model": trace.spec.as_dict(),
        "trace_digest": trace.digest,
        "trace_dataset": trace.manifest.plan.dataset,
        "trace_tokens": trace.num_tokens,
        "machines": {machine.name: asdict(machine) for machine in machines},
        "origin": describe_origin(config.run_dir),
    }
