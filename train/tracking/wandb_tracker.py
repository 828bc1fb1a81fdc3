"""A run in Weights & Biases: curves, summary, report, and artifacts from the trace to the entries.

wandb's own environment, settings files and login apply wherever an option says nothing else.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lightning.pytorch.loggers import Logger, WandbLogger

from collect.traces import Trace
from collect.traces.manifest import MANIFEST, to_json
from runtime.tools.report.html_report import HtmlReport
from train.errors import TrainError
from train.tracking.config import WandbConfig
from train.tracking.run_ids import read_run_id, write_run_id
from train.tracking.tracker import TrackedEntry, Tracker

if TYPE_CHECKING:
    from wandb import Artifact, Settings
    from wandb.sdk.wandb_run import Run

SERVER = "wandb"
STEP = "trainer/global_step"
"""The step of each curve, which WandbLogger logs."""


class WandbTracker(Tracker):
    """One run, which training, scores and report share, and which a resumed training continues.

    Raises:
        TrainError: wandb refuses the run.
    """

    def __init__(self, run_dir: Path, config: WandbConfig):
        import wandb

        try:
            self._run = start_run(run_dir, config, wandb.setup().settings)
        except wandb.Error as error:
            raise TrainError(f"logger=wandb: {error}") from error
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)
        self._main = self._make()

    def _make(self, prefix: str = "") -> Logger:
        return WandbLogger(experiment=self._run, prefix=prefix)

    def logger(self, prefix: str = "") -> Logger:
        return self._make(prefix) if prefix else self._main

    def log_summary(self, figures: Mapping[str, float]) -> None:
        self._run.summary.update(dict(figures))

    def log_trace(self, trace: Trace, *, name: str) -> None:
        """Log trace.json, which has the digest of every shard, as an input of the run."""
        import wandb

        plan = trace.manifest.plan
        artifact = wandb.Artifact(
            artifact_name(name),
            type="dataset",
            metadata={
                "digest": trace.digest,
                "where": trace.where,
                "dataset": plan.dataset,
                "tokens": trace.num_tokens,
                "held_out_tokens": len(trace.rows("held_out")),
                "model": trace.spec.as_dict(),
            },
        )
        add_bytes(artifact, MANIFEST, to_json(trace.manifest))
        aliases = ["latest", trace.digest]
        if self._run.offline:
            # `use_artifact` refuses to work offline; this is what it records for a new artifact.
            self._run._log_artifact(
                artifact, aliases=aliases, is_user_created=True, use_after_commit=True
            )
        else:
            self._run.use_artifact(artifact, aliases=aliases)

    def log_entry(self, entry: TrackedEntry) -> None:
        import wandb

        artifact = wandb.Artifact(
            artifact_name(entry.name),
            type="model",
            metadata={"digest": entry.digest, **entry.scores},
        )
        artifact.add_dir(str(entry.folder))
        aliases = ["latest", entry.digest, *(["best"] if entry.is_best else [])]
        self._run.log_artifact(artifact, aliases=aliases)

    def log_report(self, page: HtmlReport, path: Path) -> None:
        import wandb

        logged: dict[str, Any] = {"report/page": wandb.Html(str(path), inject=False)}
        for section in page.sections:
            if section.draw is not None:
                picture = str(path.with_name(f"{section.name}.png"))
                logged[f"report/{section.name}"] = wandb.Image(picture, caption=section.heading)
            if section.columns:
                rows = [list(row) for row in section.rows]
                # A null among numbers was not measured; types cannot be inferred from it.
                logged[f"report/{section.name}/values"] = wandb.Table(
                    columns=list(section.columns), data=rows, allow_mixed_types=True
                )
        self._run.log(logged)

    def finish(self, *, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


def start_run(run_dir: Path, config: WandbConfig, known: "Settings") -> "Run":
    """Start or continue the run of a folder; `known` are wandb's settings without options."""
    import wandb

    run_id = known.run_id or read_run_id(run_dir, SERVER) or uuid4().hex[:8]
    run_dir.mkdir(parents=True, exist_ok=True)
    write_run_id(run_dir, SERVER, run_id)
    return wandb.init(
        project=config.project or known.project or "moecast",
        entity=config.entity,
        name=config.name or known.run_name or run_dir.resolve().name,
        group=config.group,
        job_type=config.job_type or known.run_job_type or "train",
        tags=config.tags or None,
        dir=None if "root_dir" in known.model_fields_set else run_dir,
        id=run_id,
        resume="allow",
        mode=None if is_mode_known(known) else "offline",
    )


def is_mode_known(known: "Settings") -> bool:
    """Return whether the user has set a mode (WANDB_MODE, `wandb offline`) or logged in."""
    from wandb.sdk.lib import wbauth

    if "mode" in known.model_fields_set:
        return True
    found = wbauth.authenticate_session(
        host=known.base_url, source="moecast", prompt=False, update_session=False
    )
    return found is not None


def artifact_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)


def add_bytes(artifact: "Artifact", name: str, data: bytes) -> None:
    with artifact.new_file(name, mode="wb") as file:
        file.write(data)
