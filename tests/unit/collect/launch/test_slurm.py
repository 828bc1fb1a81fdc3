"""What the launcher understands of squeue, by a squeue that prints what it is given."""

import os
from pathlib import Path

import pytest

from collect.launch import slurm
from collect.launch.slurm import SlurmStates, describe_end, outside_jobs

JOBS = ["7_0", "7_1", "7_2"]


EXIT_CODES = [("0", "0:0"), ("256", "1:0"), ("9", "0:9"), ("137:0", "137:0")]


@pytest.mark.parametrize(("exit_code", "shown"), EXIT_CODES)
def test_state__shows_exit_code_and_signal(exit_code: str, shown: str) -> None:
    assert describe_end("FAILED", exit_code, "node3") == f"FAILED, exit code {shown} on node3"


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script, whose text is the test's; every question is asked at once."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(slurm, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(slurm, "LAST_SECONDS", 0.0)
    script = tmp_path / "squeue"
    script.touch(mode=0o755)
    return script


def test_states__only_final_ones_are_an_end(squeue: Path) -> None:
    states = SlurmStates(JOBS, lambda _: None)
    lines = ["7_0|SUSPENDED|0|node1|None|", "7_1  |PREEMPTED |0 |node2 |None|", "7_2|REQUEUED|0|||"]
    squeue.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    assert states.read_ended() == {"7_1": "PREEMPTED, exit code 0:0 on node2"}


def test_states__of_jobs_that_slurm_has_forgotten_are_an_end(squeue: Path) -> None:
    states = SlurmStates(JOBS, lambda _: None)
    squeue.write_text("#!/bin/sh\necho '7_0|RUNNING|0|node1|None|'\n")
    assert set(states.read_ended()) == {"7_1", "7_2"}
    error = "slurm_load_jobs error: Invalid job id specified"
    squeue.write_text(f"#!/bin/sh\necho '{error}' >&2\nexit 1\n")
    assert set(states.read_ended()) == set(JOBS)


def test_states__do_not_change_while_the_controller_is_silent(squeue: Path) -> None:
    said: list[str] = []
    states = SlurmStates(JOBS, said.append)
    squeue.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    assert states.read_ended() == states.read_ended() == {}
    assert len(said) == 1
    assert "Unable to contact slurm controller" in said[0]


def test_states__a_reason_to_wait_is_said_once(squeue: Path) -> None:
    said: list[str] = []
    states = SlurmStates(JOBS, said.append)
    lines = ["7_0|PENDING|0||Priority|", *(f"{job}|PENDING|0||BadConstraints|" for job in JOBS[1:])]
    squeue.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    assert states.read_ended() == states.read_ended() == {}
    (line,) = said
    assert line.startswith("Slurm job 7_1 waits: BadConstraints;")


def test_outside_jobs__hides_the_job_and_keeps_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "2", "SRUN_CPUS_PER_TASK": "1"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "mine"}
    for name, value in (own | kept).items():
        monkeypatch.setenv(name, value)
    with outside_jobs():
        assert not own.keys() & os.environ.keys()
        assert kept.items() <= os.environ.items()
    assert (own | kept).items() <= os.environ.items()
