"""Finds out that a training is finished already: its command says so, and scores nothing again."""

import json
import sys
from pathlib import Path
from typing import Any

from collect.traces import Trace
from runtime.tools.report.provenance import RUN_FILE
from train.config import TrainConfig
from zoo.entry import MANIFEST


def read_finished(config: TrainConfig, trace: Trace) -> dict[str, Any] | None:
    """Return the results of the run folder if they are complete, and of this trace.

    The command line puts results of another configuration aside; without run.json, their
    configuration is not known. None with `overwrite`, too.
    """
    assert config.run_dir is not None
    path = config.run_dir / "results.json"
    if config.overwrite or not path.is_file() or not (config.run_dir / RUN_FILE).is_file():
        return None
    results: dict[str, Any] = json.loads(path.read_text())
    manifests = [config.run_dir / "entries" / name / MANIFEST for name in results["entries"]]
    if results["trace"]["digest"] != trace.digest or not all(map(Path.is_file, manifests)):
        return None
    sys.stderr.write(
        f"this training is finished: {path} has what it found, {config.run_dir / 'entries'} the "
        "predictors; overwrite=true trains them anew\n"
    )
    return results
