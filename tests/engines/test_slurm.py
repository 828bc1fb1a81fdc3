"""Debian's Slurm runs collect; the commands are those of docs/distributed.md."""

import json
import os
import re
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from collect.config import LauncherConfig, LauncherKind
from collect.errors import LaunchError
from collect.launch.pool import start_pool
from collect.traces import Trace, TraceWriter
from configs.program import run_program
from tests.builders import slurm_cluster as slurm
from tests.builders.processes import write_moecast
from tests.builders.recordable import recording_options
from tests.builders.slurm_cluster import SlurmCluster
from tests.builders.traces import make_plan, make_spec, make_trace
from tests.builders.waiting import wait_for
from tests.docs.pages import ROOT
from tests.docs.tested_commands import TestedCommand, read_block

pytestmark = [pytest.mark.engines, pytest.mark.timeout(480)]

NUM_UNITS = 12
HELD = (2, 6, 10)
"""The third unit of each of three jobs: before it, two are finished."""
ENTRY = "tests.builders.launched:open_held_trace"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    reason = slurm.why_impossible()
    if reason is not None:
        pytest.skip(reason)
    slurm.install()
    with slurm.slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


@pytest.fixture(autouse=True)
def in_cluster(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What runs here is a client of the cluster, whose nodes find the code."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.config))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield
    cluster.wait_until_idle()


@dataclass
class HeldRecording:
    """Three jobs that record a trace and wait, each in the middle of its share."""

    cluster: SlurmCluster
    home: Path
    said: list[str] = field(default_factory=list)
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plan = make_plan(make_spec(), num_units=NUM_UNITS, requests_per_unit=2)
        self.writer = TraceWriter(self.home / "trace", self.plan)
        self.finished: dict[int, int] = {}
        """Inode of each part that was there before the fault."""
        self.retried = 0

    def run(self, advance: Callable[[str], object] = lambda _: None) -> None:
        size = {"workers": 3, "cpus": slurm.CPUS_PER_NODE, "threads": 1}
        config = LauncherConfig(kind=LauncherKind.SLURM, **size, options=self.options)
        arguments = {"folder": f"{self.home}/trace", "home": str(self.home)}
        arguments |= {"units": NUM_UNITS, "held": list(HELD)}
        options = {"logs": self.home / "logs", "name": "collect-held", "say": self.said.append}
        with start_pool(config, ENTRY, arguments, **options) as pool:
            pool.run([self.plan.units[unit] for unit in self.writer.missing()], advance=advance)
            self.retried = pool.counts["retried"]

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Runs it while the block does; releases the units that are held at the block's end."""
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(self.run)
            yield
            self.release(*HELD)
            done.result(timeout=200)

    def begun(self) -> list[tuple[int, str]]:
        """Returns unit and job of each attempt."""
        log = self.home / "begun.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [(int(unit), job) for unit, job in (line.split() for line in lines)]

    def wait_until_held(self) -> dict[int, str]:
        """Waits until each job is in its held unit; returns its job by unit."""
        wait_for(lambda: set(HELD) <= {unit for unit, _ in self.begun()}, "units that are held")
        done = [unit for unit, _ in self.begun() if unit not in HELD and self.writer.has(unit)]
        self.finished = {unit: self.part(unit).stat().st_ino for unit in done}
        assert len(self.finished) == 6
        return dict(self.begun())

    def part(self, unit: int) -> Path:
        (found,) = (self.home / "trace").glob(f"*{unit:05d}-*.arrow")
        return found

    def release(self, *units: int) -> None:
        for unit in units:
            (self.home / f"release-{unit}").touch()

    def logs(self, job: str) -> str:
        paths = (self.home / "logs" / "jobs").glob(f"{job}_*_log.*")
        return "".join(path.read_text() for path in paths)

    def assert_whole(self, *, begun_twice: set[int]) -> None:
        """The trace is that of one process, and no finished unit was begun again."""
        whole = make_trace(self.home / "whole", num_units=NUM_UNITS, requests_per_unit=2)
        assert self.writer.finish().digest == whole.digest
        counts = Counter(unit for unit, _ in self.begun())
        assert counts == {unit: 1 + (unit in begun_twice) for unit in range(NUM_UNITS)}
        assert {unit: self.part(unit).stat().st_ino for unit in self.finished} == self.finished
        # A job that Slurm starts again does not even look at units that it has done.
        assert count_ended(self.home / "logs", self.plan.units) == dict.fromkeys(self.plan.units, 1)


def count_ended(logs: Path, units: Collection[str]) -> Counter[str]:
    """Returns how often each unit was done, by the jobs' logs, when all of `units` are in them.

    Slurm writes them a little later.
    """
    counts: Counter[str] = Counter()

    def has_all() -> bool:
        counts.clear()
        for log in (logs / "jobs").glob("*_log.out"):
            counts.update(re.findall(r"^moecast: (\S+): ended$", log.read_text(), re.MULTILINE))
        return set(units) <= set(counts)

    wait_for(has_all, "a line for each unit")
    return counts


@pytest.fixture
def recording(cluster: SlurmCluster, tmp_path: Path) -> HeldRecording:
    return HeldRecording(cluster, tmp_path)


def state_of(cluster: SlurmCluster, job: str) -> str:
    ((_, _, state, _),) = cluster.jobs("-t", "all", "-j", job)
    return state


@pytest.mark.parametrize("fault", ["requeue", "preemption"])
def test_job__that_is_requeued_goes_on_where_it_was(fault, cluster, recording):
    with recording.in_background():
        job = recording.wait_until_held()[HELD[1]]
        if fault == "requeue":
            cluster.run("scontrol", "requeue", job)
        else:
            ((_, _, state, node),) = cluster.jobs("-j", job)
            assert state == "RUNNING"
            urgent = ["--partition=urgent", f"--nodelist={node}", "--output=/dev/null"]
            urgent += [f"--cpus-per-task={slurm.CPUS_PER_NODE}", "--wrap=true"]
            cluster.run("sbatch", *urgent)
        wait_for(lambda: state_of(cluster, job) == "PENDING", "a requeued job")
    recording.assert_whole(begun_twice={HELD[1]})
    assert dict(recording.begun())[HELD[1]] == job, "the same job did it again"
    assert recording.retried == 0


def test_job__that_is_cancelled_is_replaced_and_named(cluster, recording):
    with recording.in_background():
        job = recording.wait_until_held()[HELD[2]]
        cluster.run("scancel", job)
        wait_for(lambda: state_of(cluster, job) == "CANCELLED", "a cancelled job")
    recording.assert_whole(begun_twice={HELD[2]})
    assert recording.retried == 1
    (line,) = [line for line in recording.said if "tried again" in line]
    log = recording.home / "logs" / "jobs" / f"{job}_0_log.err"
    assert f"its job {job} ended (CANCELLED, exit code 0:15" in line
    assert f"log: {log}" in line
    assert "CANCELLED" in log.read_text()


def test_time_limit__lets_a_unit_end_and_kills_one_that_does_not(cluster, recording):
    with recording.in_background():
        jobs = recording.wait_until_held()
        for job in jobs.values():
            cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
        for unit in HELD:
            wait_for(lambda unit=unit: "limit is near" in recording.logs(jobs[unit]), "the signal")
        recording.release(*HELD[1:])
        wait_for(lambda: state_of(cluster, jobs[HELD[0]]) == "TIMEOUT", "the time limit")
    recording.assert_whole(begun_twice={HELD[0]})
    assert recording.retried == 1, "a job that stops in time costs nothing"
    (line,) = [line for line in recording.said if "tried again" in line]
    assert f"its job {jobs[HELD[0]]} ended (TIMEOUT" in line


def wait_until_saved(cluster: SlurmCluster, jobs: Mapping[int, str]) -> None:
    """Waits until the controller has written down that these jobs run.

    It writes seconds after a change. Killed before, it starts them once more on nodes that have
    them, which Slurm drains.
    """
    since = time.time()
    for job in jobs.values():
        cluster.run("scontrol", "update", f"jobid={job}", "comment=running")
    state = cluster.config.parent / "state/job_state"
    wait_for(lambda: state.stat().st_mtime > since, "the controller's state")


def test_controller__may_restart_before_and_while_jobs_run(cluster, recording):
    cluster.kill("slurmctld")
    with recording.in_background():
        wait_for(lambda: any("waiting for Slurm" in line for line in recording.said), "a line")
        cluster.start("slurmctld")
        wait_until_saved(cluster, recording.wait_until_held())
        cluster.kill("slurmctld")
        wait_for(lambda: any("squeue failed" in line for line in recording.said), "another line")
        recording.release(*HELD)
        wait_for(lambda: len(recording.begun()) == NUM_UNITS, "jobs go on without it")
        cluster.start("slurmctld")
    recording.assert_whole(begun_twice=set())
    assert recording.retried == 0


def test_interrupt__cancels_the_jobs_and_keeps_what_they_did(cluster, recording):
    def interrupt(_: str) -> None:
        recording.wait_until_held()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recording.run(advance=interrupt)
    wait_for(lambda: not cluster.jobs(), "cancelled jobs")
    recording.release(*HELD)
    recording.run()
    recording.assert_whole(begun_twice=set(HELD))


def test_job__that_cannot_start_is_explained(cluster: SlurmCluster, recording: HeldRecording):
    """It asks for a day in a partition of half an hour."""
    recording.options = {"slurm_partition": "short"}
    waits = r"Slurm job (\d+)_0 waits: PartitionTimeLimit; scontrol show job \1_0"
    with recording.in_background():
        wait_for(lambda: any("waits" in line for line in recording.said), "a line")
        (line,) = [line for line in recording.said if "waits" in line]
        array = re.search(waits, line)
        assert array is not None, line
        cluster.run("scontrol", "update", f"JobId={array[1]}", "TimeLimit=30")
    recording.assert_whole(begun_twice=set())


def test_submission__that_slurm_refuses_names_its_reason(recording: HeldRecording) -> None:
    recording.options = {"slurm_partition": "no-such"}
    with pytest.raises(LaunchError, match=r"sbatch refuses the jobs: .*invalid partition") as said:
        recording.run()
    assert re.search(r"launcher\.partition=", str(said.value))


@dataclass(frozen=True)
class Page:
    """The commands of the page, on a tiny model."""

    folder: Path
    model: str
    """Options for a trace of some ten parts."""

    def adapt(self, command: TestedCommand, folder: Path | None = None) -> str:
        """Gives a command the tiny model, and a folder, or this one, as the shared disk."""
        # A job's variables must not reach the jobs that it submits.
        options = {"sbatch": "--ntasks=2", "moecast collect": self.model}
        after = {words: option for words, option in options.items() if words in command.text}
        return command.adapt({"/shared": folder or self.folder}, after=after)

    def start(self, command: str, cluster: SlurmCluster) -> subprocess.Popen[str]:
        programs = write_moecast(self.folder / "bin").parent
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        environment = cluster.environment | {"PATH": path, "PYTHONPATH": str(ROOT)}
        options = {"cwd": self.folder, "env": environment, "text": True}
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen([*slurm.MORTAL, *shlex.split(command)], **options)

    def end(self, process: subprocess.Popen[str]) -> str:
        """Waits for a command and returns what it said."""
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
        return said

    def results(self, name: str) -> dict:
        return json.loads((self.folder / name / "results.json").read_text())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("shared")
    return Page(folder, " ".join(recording_options(folder)))


@pytest.fixture(scope="module")
def collected(page: Page, cluster: SlurmCluster) -> str:
    """Runs the page's collect, asks its squeue meanwhile; returns what the command said."""
    collect, squeue, _ = map(page.adapt, read_block("distributed.md", "slurm"))
    with page.start(collect, cluster) as process:
        wait_for(lambda: cluster.jobs("-t", "RUNNING") or process.poll(), "a job")
        listed = subprocess.check_output(shlex.split(squeue), env=cluster.environment, text=True)
        said = page.end(process)
    assert "moecast-collect-tiny RUNNING node" in listed
    return said


def test_collect__of_the_page_has_the_digest_of_one_process(page: Page, collected: str) -> None:
    assert re.search(r"Slurm \d+: 2 jobs named moecast-collect-tiny; logs: ", collected)
    whole = page.folder / "whole"
    options = [*shlex.split(page.model), f"output={whole}", f"run_dir={page.folder / 'here'}"]
    assert run_program("collect", options) == 0
    assert page.results("collect")["digest"] == page.results("here")["digest"]
    units = ["plan", *Trace.open(whole).manifest.plan.units]
    assert len(units) >= 6
    assert count_ended(page.folder / "collect" / "workers", units) == dict.fromkeys(units, 1)


def test_collect__with_gpus_runs_where_slurm_has_them(page, cluster, collected):
    """A node of the partition declares a GPU that it does not have."""
    (documented,) = read_block("distributed.md", "slurm-gpu")
    folder = page.folder / "with-gpus"
    folder.mkdir()
    seen: set[tuple[str, ...]] = set()
    with page.start(page.adapt(documented, folder), cluster) as process:

        def has_ended() -> bool:
            lines = cluster.run("squeue", "-h", "-t", "RUNNING", "-o", "%P|%b|%N").splitlines()
            seen.update(tuple(line.split("|")) for line in lines)
            return process.poll() is not None

        wait_for(has_ended, "the end of the command")
        page.end(process)
    assert seen == {("gpu", "gres:gpu:1", slurm.GPU_NODE)}
    results = json.loads((folder / "collect" / "results.json").read_text())
    assert results["digest"] == page.results("collect")["digest"]


def test_collect__of_the_page_runs_as_a_job_itself(page, cluster, collected):
    """The jobs that it submits take nothing from the one that it runs in."""
    with page.start(page.adapt(read_block("distributed.md", "slurm")[2]), cluster) as process:
        page.end(process)
    log = (page.folder / "job.log").read_text()
    assert re.search(r"Slurm \d+: 2 jobs named moecast-collect-tiny; logs: ", log)
    assert page.results("as-job")["digest"] == page.results("collect")["digest"]
