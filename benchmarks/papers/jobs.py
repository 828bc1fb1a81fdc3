"""The papers' replays over several processes; each finished one is a file to resume from."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console

from benchmarks.klotski.group_replays import GroupReplays
from benchmarks.papers.cells import CellResult, PaperCell
from benchmarks.papers.config import PapersConfig
from benchmarks.papers.paper_context import PaperContext, ReplayedRequests, grouping
from collect.traces import Trace
from runtime.commands.progress import progress
from runtime.config import ModelConfig
from train.evaluate.jobs import CODE, code_digest
from train.evaluate.variants import FoundPredictor, PredictorSources
from train.resumable import FinishedPieces, OnFinished, run_jobs

OWN_CODE = (
    "benchmarks/papers/cells.py",
    "benchmarks/papers/paper_context.py",
    "benchmarks/klotski/environments.py",
    "benchmarks/klotski/group_replays.py",
    "benchmarks/klotski/prefetch_accuracy.py",
    "benchmarks/klotski/workload.py",
)
"""Sources on which figures depend, in addition to those of `evaluate`."""


DEFAULT_FOLDER = Path("runs/papers")
"""Folder of the finished replays."""


@dataclass(frozen=True, kw_only=True)
class PaperJob:
    """Replays with the same steps and forecasts, which are made once for all of them."""

    trace: Path
    requests: ReplayedRequests
    predictor: str | None
    predictors: Mapping[str, FoundPredictor] = field(repr=False)
    cells: Sequence[tuple[str, PaperCell]] = field(repr=False)
    """With the digest of each."""

    @property
    def digests(self) -> Sequence[str]:
        return [digest for digest, _ in self.cells]

    @property
    def cost(self) -> float:
        return len(self.cells) * (1 if self.predictor is None else 2)

    def run(self, on_finished: OnFinished) -> None:
        """Replays each cell and calls `on_finished` with its digest and figures."""
        context = PaperContext(self.trace, requests=self.requests, predictors=self.predictors)
        groups = GroupReplays(context.trace)
        # Forecasts are folded once for all cells of a shape's number of experts.
        for digest, cell in sorted(
            self.cells, key=lambda pair: (pair[1].shape.num_experts, pair[1].shape.top_k)
        ):
            if cell.drawn is None:
                result = context.run(cell, self.predictor)
            else:
                result = groups.run(cell, cell.drawn)
            on_finished(digest, asdict(result))


class PaperReplays:
    """Runs the replays of a trace that have not finished yet, and reads them all.

    Finished replays are files in the run folder.
    """

    def __init__(self, trace: Trace, config: PapersConfig):
        self._trace = trace
        self._requests = ReplayedRequests(measured=config.requests, warm=config.warm_requests)
        self._sources = PredictorSources(trace, model=ModelConfig(), entries=config.entries, seed=0)
        self._folder = config.run_dir or DEFAULT_FOLDER
        self._workers = config.workers or os.cpu_count() or 1

    def run(self, cells: Sequence[PaperCell]) -> dict[str, CellResult]:
        """Returns the results by the cells' digests without others."""
        finished = FinishedPieces(self._folder)
        code = code_digest((*CODE, *OWN_CODE))
        digests: dict[str, str] = {}
        missing: dict[str, tuple[str | None, PaperCell]] = {}
        for cell in cells:
            short = cell.digest()
            if short in digests:
                continue
            predictor = self._find_predictor(cell)
            digest = cell.digest(
                self._trace.digest,
                repr(self._requests),
                code,
                "" if predictor is None else self._sources.found[predictor].digest,
            )
            digests[short] = digest
            if not finished.path(digest).exists():
                missing[digest] = predictor, cell
        console = Console(stderr=True)
        console.print(
            f"{len(digests) - len(missing)} of {len(digests)} replays are finished",
            highlight=False,
        )
        with progress(console, "replaying", total=len(missing)) as advance:
            run_jobs(
                self._group(missing), folder=self._folder, workers=self._workers, advance=advance
            )
        return {
            short: CellResult.from_dict(finished.read(digest)) for short, digest in digests.items()
        }

    def _find_predictor(self, cell: PaperCell) -> str | None:
        kind = cell.system.predictor
        if not cell.system.prefetch or kind is None or cell.drawn is not None:
            return None
        return self._sources.find(kind, cell.system.predictor_options)

    def _group(self, missing: Mapping[str, tuple[str | None, PaperCell]]) -> list[PaperJob]:
        groups: dict[object, PaperJob] = {}
        for digest, (predictor, cell) in missing.items():
            key: tuple[object, ...] = (predictor, grouping(cell))
            if predictor is None:
                # No forecasts to record once for all of them: smaller jobs share the work better.
                key = (*key, cell.system.eviction, cell.shape.num_experts)
            stored = self._sources.found
            job = groups.get(key) or PaperJob(
                trace=self._trace.path,
                requests=self._requests,
                predictor=predictor,
                predictors={} if predictor is None else {predictor: stored[predictor]},
                cells=(),
            )
            groups[key] = replace(job, cells=(*job.cells, (digest, cell)))
        return list(groups.values())
