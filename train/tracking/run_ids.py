"""Ids of a run folder's runs in tracking servers, so that a resumed training continues them."""

import json
from pathlib import Path

from predictors.files import write_json

FILE = "tracking.json"


def read_run_id(run_dir: Path, server: str) -> str | None:
    """Return the id of the folder's run; None if it has none yet."""
    path = run_dir / FILE
    return json.loads(path.read_text()).get(server) if path.is_file() else None


def write_run_id(run_dir: Path, server: str, run_id: str) -> None:
    path = run_dir / FILE
    known = json.loads(path.read_text()) if path.is_file() else {}
    write_json(path, {**known, server: run_id})


def forget_run_ids(run_dir: Path) -> None:
    """Let the next training in the folder start new runs."""
    (run_dir / FILE).unlink(missing_ok=True)
