"""Runs of one peer: each a new process under the memory limit, with a cold page cache."""

import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environments import interpreter
from benchmarks.peers.limit import CachedFile, MemoryLimiter
from benchmarks.peers.peers import Peer
from benchmarks.peers.weights import ModelWeights, WeightPaths, list_files
from benchmarks.process import ROOT, ProcessFailed, WorkerProcess, start_worker
from predictors.units import MIB
from runtime.library_defaults import WAIT_POLICY

TIMEOUT_SECONDS = 150.0
"""Limit of importing, loading and all prompts; each prompt has its own, shorter one."""
PREPARE_SECONDS = 600.0


@dataclass(frozen=True)
class Questions:
    """The prompts that every peer answers."""

    prompts: list[list[int]]
    new_tokens: int
    seconds_per_prompt: float
    threads: int
    warm_up: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class PeerRunner:
    """The weights that the runs of all peers share."""

    weights: ModelWeights

    def prepare(self, peer: Peer) -> None:
        """Writes the weights in the peer's layout, and lets it convert them, without a limit.

        Raises:
            ProcessFailed: no environment, an error, or no end.
        """
        if peer.environment is not None:
            interpreter(peer.environment, self.weights.environments)
        self._write(peer)
        done = self._scratch(peer) / "prepared"
        if not peer.own_files or done.exists():
            return
        self._start(peer, Questions([], 0, 0.0, os.cpu_count() or 1), 0).finish(PREPARE_SECONDS)
        done.touch()

    def run(
        self,
        peer: Peer,
        questions: Questions,
        *,
        budget_bytes: int,
        limit_bytes: int,
        reserved_bytes: int = 0,
    ) -> dict[str, Any]:
        """Returns the fields of a `PeerRun`: the worker's report, and its memory.

        Args:
            reserved_bytes: Part of the limit for the peer's own memory (see `MemoryLimiter`).

        Raises:
            ProcessFailed: no environment, an error, more memory than the limit, or no end.
        """
        files = self._weight_files(peer)
        for path in files:
            file = CachedFile(path)
            file.drop()
            file.close()
        worker = self._start(peer, questions, budget_bytes)
        limiter = MemoryLimiter(worker.process, files, limit_bytes, reserved_bytes)
        try:
            limiter.watch(TIMEOUT_SECONDS)
        except TimeoutError as error:
            raise ProcessFailed(str(error)) from None
        finally:
            worker.kill()
        peak = limiter.peak
        if limiter.was_killed:
            raise ProcessFailed(
                f"killed: {peak.anonymous / MIB:.0f} MiB of anonymous memory, above "
                f"{limit_bytes / MIB:.0f} MiB"
            )
        return worker.read_report() | {
            "peak_anonymous_bytes": peak.anonymous,
            "peak_cached_bytes": peak.cached,
            "peak_charged_bytes": peak.total,
            "mean_charged_bytes": limiter.mean_charged_bytes(),
            "limiter_busy_seconds": limiter.busy_seconds,
        }

    def _start(self, peer: Peer, questions: Questions, budget_bytes: int) -> WorkerProcess:
        if peer.environment is None:
            # As this project's commands set it: a thread that spins takes a core from the others.
            python, environment = Path(sys.executable), {WAIT_POLICY: "passive"}
            environment["PYTHONPATH"] = str(ROOT)
        else:
            python = interpreter(peer.environment, self.weights.environments)
            environment = {"PYTHONPATH": ""}
        paths = self._write(peer)
        experts_bytes, other_bytes = self.weights.measure()
        request = {
            "weights": paths.path.resolve(),
            "store": None if paths.store is None else paths.store.resolve(),
            "dtype": self.weights.dtype,
            **asdict(questions),
            "budget_bytes": budget_bytes,
            "experts_bytes": experts_bytes,
            "other_bytes": other_bytes,
            "scratch": self._scratch(peer),
            "options": peer.options,
        }
        return start_worker(
            [python, peer.worker],
            request,
            self.weights.work / "logs",
            name=peer.name,
            environment=environment,
        )

    def _write(self, peer: Peer) -> WeightPaths:
        return self.weights.write(peer.weights(self.weights.format))

    def _scratch(self, peer: Peer) -> Path:
        folder = self.weights.folder / f"{self.weights.format}-{peer.name}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder.resolve()

    def _weight_files(self, peer: Peer) -> list[Path]:
        """Returns the files that the peer reads its weights from."""
        if peer.own_files:
            return list_files(self._scratch(peer))
        return self._write(peer).files()
