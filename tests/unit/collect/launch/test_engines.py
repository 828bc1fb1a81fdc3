"""One contract for every engine: processes, Ray's actors, jobs of submitit's local executor."""

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from collect.config import LauncherConfig, LauncherKind
from collect.errors import LaunchError
from collect.launch.pool import start_pool
from collect.launch.processes import share_gpus
from predictors.errors import MoecastError
from tests.builders.processes import ROOT, run
from tests.builders.waiting import wait_for

ENTRY = "tests.builders.launched:open_work"


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """One for all tests of this module: it takes seconds to start."""
    from collect.launch.ray import join_ray

    owns_ray = join_ray(LauncherConfig(kind=LauncherKind.RAY, workers=2))
    yield
    if owns_ray:
        import ray

        ray.shutdown()


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.engines), "slurm"])
def config(request, monkeypatch: pytest.MonkeyPatch) -> LauncherConfig:
    monkeypatch.setattr("collect.launch.slurm.POLL_SECONDS", 0.05)
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    cluster = "local" if request.param == "slurm" else None
    few = {"workers": 2, "threads": 1, "retries": 2}
    return LauncherConfig(kind=LauncherKind(request.param), cluster=cluster, **few)


def assert_no_worker_is_left() -> None:
    """Workers of launcher=local and jobs of submitit."""
    workers = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(child.cmdline())
            if "spawn_main" in line or "submitit" in line:
                workers.append(child)
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


def begun_units(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "begun.log").read_text().splitlines()]


def test_engine__does_every_unit_and_outlives_its_workers(config, tmp_path) -> None:
    advanced: list[str] = []
    said: list[str] = []
    units = ["slow-1", "fails-1-2", "kills-1-1", "fine-1", "fine-2", "slow-2"]
    arguments = {"folder": str(tmp_path)}
    with start_pool(config, ENTRY, arguments, logs=tmp_path / "logs", say=said.append) as pool:
        values = pool.run(units, advance=advanced.append)
        assert values == {unit: {"unit": unit} for unit in units}
        assert sorted(advanced) == sorted(units)
        assert any("fails-1-2 is tried again: OSError: fails-1-2 fails" in line for line in said)
        for unit in units:
            assert (tmp_path / unit).read_text() == f"content of {unit}"
        begun = begun_units(tmp_path)
        assert Counter(begun) == dict.fromkeys(units, 1) | {"fails-1-2": 3, "kills-1-1": 2}
        # A second run finds everything there: nothing is begun.
        assert pool.run(units) == values
        assert begun_units(tmp_path) == begun
        with pytest.raises(LaunchError, match=r"1 of 2 units failed.* kills-2-99: its "):
            pool.run(["kills-2-99", "fine-3"])
        assert (tmp_path / "fine-3").exists()
        assert begun_units(tmp_path).count("kills-2-99") == 1 + config.retries
    assert_no_worker_is_left()


def test_engine__an_error_of_the_user_is_reported_as_it_is(config, tmp_path) -> None:
    arguments = {"folder": str(tmp_path), "refuses": "there is no such model"}
    refused = pytest.raises(LaunchError, match=r"^there is no such model$")
    with refused, start_pool(config, ENTRY, arguments, logs=tmp_path / "logs") as pool:
        pool.run(["fine-1", "fine-2"])
    refused = pytest.raises(LaunchError, match=r"^wrong-1 is wrong$")
    with refused, start_pool(config, ENTRY, {"folder": str(tmp_path)}, logs=tmp_path) as pool:
        pool.run(["wrong-1"])
    assert begun_units(tmp_path) == ["wrong-1"]
    assert_no_worker_is_left()


def test_local__what_a_worker_prints_is_in_its_log(tmp_path: Path) -> None:
    config = LauncherConfig(workers=1, threads=1)
    logs = tmp_path / "logs"
    with start_pool(config, ENTRY, {"folder": str(tmp_path)}, logs=logs) as pool:
        pool.run(["fine-1", "fails-1-1"])
    text = (logs / "worker-0.log").read_text()
    assert "noise of fine-1" in text
    assert "Traceback" in text
    arguments = {"folder": str(tmp_path), "breaks": True}
    broken = pytest.raises(LaunchError, match=r"^ImportError: no such library$")
    with broken, start_pool(config, ENTRY, arguments, logs=logs) as pool:
        pool.run(["fine-1"])
    assert "no such library" in (logs / "worker-0.log").read_text()


def test_local__workers_end_when_the_command_is_killed(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\n"
        "from collect.config import LauncherConfig\n"
        "from collect.launch.pool import start_pool\n"
        "config = LauncherConfig(workers=2, threads=1)\n"
        f"home = {str(tmp_path)!r}\n"
        f"pool = start_pool(config, {ENTRY!r}, {{'folder': home}}, logs=Path(home, 'logs'))\n"
        "pool.run([f'slow-{i}' for i in range(999)])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    log = tmp_path / "begun.log"

    def has_begun() -> bool:
        assert process.poll() is None
        return log.exists() and len(log.read_text().splitlines()) >= 3

    wait_for(has_begun, "units that are begun")
    workers = {int(line.split()[1]) for line in log.read_text().splitlines()}
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(psutil.pid_exists, workers)), "the end of the workers")


def test_local__gpus_are_divided_among_workers(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = LauncherConfig(workers=2, threads=3, gpus=2)
    with start_pool(config, "tests.builders.launched:open_surroundings", {}, logs=tmp_path) as pool:
        found = pool.run([f"u{i}" for i in range(8)]).values()
    assert {(one["gpus"], one["threads"]) for one in found} <= {("4,5", "3"), ("6,7", "3")}


@pytest.mark.parametrize(("visible", "workers"), [("", 1), ("-1", 1), ("4,5,6", 2), (None, 999)])
def test_local__gpus_that_are_not_visible_are_refused(visible, workers, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    said = rf"launcher.workers={workers} with launcher.gpus=2 each: \d+ GPUs are visible here"
    with pytest.raises(LaunchError, match=said):
        share_gpus(LauncherConfig(workers=workers, gpus=2))


@pytest.mark.engines
def test_ray__keeps_to_loopback_without_dashboard_and_with_a_token(ray_session: None) -> None:
    import ray

    assert ray.util.get_node_ip_address() == "127.0.0.1"
    listening = set()
    for one in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        # One that has just ended; Linux gives what is left of it to root.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            found = [c for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            listening |= {connection.laddr.ip.removeprefix("::ffff:") for connection in found}
    assert listening == {"127.0.0.1"}
    assert not ray._private.worker.global_worker.node.webui_url
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(os.environ["RAY_AUTH_TOKEN"]) >= 32


JOIN = """
import json, sys
from collect.config import LauncherConfig, LauncherKind
from collect.launch.ray import join_ray
from collect.errors import LaunchError
try:
    join_ray(LauncherConfig(kind=LauncherKind.RAY, ray_address="127.0.0.1:9"))
except LaunchError as error:
    print(json.dumps([str(error), "ray" in sys.modules]))
"""


def test_ray__joins_a_cluster_with_a_token_only(tmp_path: Path) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = run(sys.executable, "-c", JOIN, environment=clean | {"HOME": str(tmp_path)})
    message, imported = json.loads(done.stdout)
    assert "missing token to join a Ray cluster" in message
    assert "ray get-auth-token --generate" in message
    assert not imported, "nothing is reached before there is a token"


def test_slurm__a_missing_cluster_is_reported_in_one_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"launcher\.cluster=local"):
        start_pool(LauncherConfig(kind=LauncherKind.SLURM), ENTRY, {}, logs=tmp_path)


def test_config__refuses_what_does_not_fit() -> None:
    with pytest.raises(MoecastError, match=r"launcher\.workers=0"):
        LauncherConfig(workers=0)
    with pytest.raises(MoecastError, match=r"launcher\.ray_address=a:1 is for launcher=ray"):
        LauncherConfig(ray_address="a:1")
