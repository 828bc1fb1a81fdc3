"""Finds a finished trace of the same prompts, so that nothing is recorded twice."""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from collect.errors import TraceError
from collect.recording import RecordingJob
from collect.traces.manifest import MANIFEST, TraceManifest, hash_value, read_manifest

log = logging.getLogger(__name__)

PACKING = ("batch_size", "shard_bytes")
"""Settings that divide the work. They change at most the last bits of the states."""


def find_same_trace(job: RecordingJob, folder: Path) -> Path | None:
    """Return the finished trace in a subfolder of `folder` that contains all that `job` records.

    It may have more signals, batches of another size and another name. The folder of the job itself
    comes first.
    """
    paths = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    for path in sorted(paths, key=lambda path: path != Path(job.where)):
        try:
            manifest = read_manifest(path)
        except TraceError as error:
            log.warning("%s", error)
            continue
        if contains(manifest, job):
            return path
    return None


def contains(manifest: TraceManifest, job: RecordingJob) -> bool:
    """Return whether a trace is finished and has the rows and the signals of the job."""
    plan = manifest.plan
    return (
        manifest.complete
        and plan.source == "recorded"
        and set(job.signals) <= set(plan.signals)
        and without_packing(plan.settings) == without_packing(asdict(job.settings))
        and job.is_of_model(plan.spec)
        and plan.prompts_digest == hash_value([prompt.digest for prompt in job.prompts])
    )


def without_packing(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in PACKING}
