"""One contract for every engine: processes, Ray's actors, jobs of submitit's local executor."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from collect.errors import LaunchError
from collect.launch.config import LauncherConfig, LauncherKind
from collect.launch.crews import dispatcher_for
from collect.launch.dispatch import Dispatcher
from collect.launch.local import LocalCrew
from collect.launch.mailbox import Beat, Mailbox, Pulse
from collect.launch.task import Task
from collect.traces import TraceWriter
from predictors.errors import MoecastError
from tests.builders.traces import make_plan, make_spec, make_trace

ENTRY = "tests.builders.launched:open_work"
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """One for all tests of this module: it takes seconds to start."""
    from collect.launch.ray import join

    began = join(LauncherConfig(kind=LauncherKind.RAY, workers=2))
    yield
    if began:
        import ray

        ray.shutdown()


@pytest.fixture(
    params=["local", pytest.param("ray", marks=pytest.mark.engines), "slurm"],
)
def config(request: pytest.FixtureRequest) -> LauncherConfig:
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    cluster = "local" if request.param == "slurm" else None
    return LauncherConfig(kind=LauncherKind(request.param), workers=2, threads=1, cluster=cluster)


def own_children() -> set[int]:
    return {one.pid for one in psutil.Process().children() if "launch" in " ".join(one.cmdline())}


def test_engine__does_every_unit_and_outlives_its_workers(
    config: LauncherConfig, tmp_path: Path
) -> None:
    moved: list[int] = []
    units = ["slow-1", "fails-1-2", "kills-1-1", "fails-2-99", "fine-1", "fine-2", "slow-2"]
    arguments = {"folder": str(tmp_path)}
    with dispatcher_for(config, ENTRY, arguments, folder=tmp_path / "logs") as dispatcher:
        assert dispatcher.begin() == arguments
        outcome = dispatcher.run(units, advance=moved.append, amounts=[2] * len(units))
    assert set(outcome.results) == {*units} - {"fails-2-99"}
    assert outcome.results["fine-1"] == {"unit": "fine-1"}
    assert outcome.given_up == {"fails-2-99": "OSError: fails-2-99 fails"}
    assert outcome.num_replaced == 1
    assert sum(moved) == 2 * 6
    for unit in outcome.results:
        assert (tmp_path / unit).read_text() == f"content of {unit}"
    begun = [line.split() for line in (tmp_path / "begun.log").read_text().splitlines()]
    assert len({pid for _, pid in begun}) in (2, 3), "two workers, and the one that was replaced"
    assert [unit for unit, _ in begun].count("kills-1-1") == 2
    assert [unit for unit, _ in begun].count("fine-1") == 1
    # A second run finds everything there: nothing is begun.
    with dispatcher_for(config, ENTRY, arguments, folder=tmp_path / "logs") as dispatcher:
        dispatcher.begin()
        again = dispatcher.run(sorted(outcome.results))
    assert again.results == outcome.results
    assert len((tmp_path / "begun.log").read_text().splitlines()) == len(begun)
    assert not own_children()


def test_local__what_the_user_must_mend_is_told_as_it_is(tmp_path: Path) -> None:
    config = LauncherConfig(workers=2, threads=1)
    arguments = {"folder": str(tmp_path), "refuses": "there is no such model"}
    with (
        pytest.raises(LaunchError, match=r"^there is no such model$"),
        dispatcher_for(config, ENTRY, arguments, folder=tmp_path / "logs") as dispatcher,
    ):
        dispatcher.begin()
    arguments = {"folder": str(tmp_path), "breaks": True}
    with (
        pytest.raises(LaunchError, match=r"no worker is left: ImportError: no such library"),
        dispatcher_for(config, ENTRY, arguments, folder=tmp_path / "logs") as dispatcher,
    ):
        dispatcher.begin()
    assert "Traceback" in (tmp_path / "logs" / "worker-0.log").read_text()
    assert not own_children()


def test_local__workers_end_when_their_dispatcher_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from collect.launch.config import LauncherConfig\n"
        "from collect.launch.crews import dispatcher_for\n"
        "config = LauncherConfig(workers=2, threads=1)\n"
        f"home = {str(tmp_path)!r}\n"
        "d = dispatcher_for(config, 'tests.builders.launched:open_work', {'folder': home},"
        " folder=Path(home, 'logs'))\n"
        "d.begin(); d.run([f'slow-{i}' for i in range(999)])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    log = tmp_path / "begun.log"
    deadline = time.monotonic() + 60
    while not log.exists() or len(log.read_text().splitlines()) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = {int(line.split()[1]) for line in log.read_text().splitlines()}
    process.kill()
    process.wait()
    while any(psutil.pid_exists(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker works on for nobody"
        time.sleep(0.02)


@pytest.mark.slow
def test_local__a_worker_killed_every_five_seconds_loses_and_doubles_nothing(
    tmp_path: Path,
) -> None:
    """Parts of a real trace, of half a second each; no model, so that a worker starts at once."""
    plan = make_plan(make_spec(), num_units=60, requests_per_unit=2)
    arguments = {"folder": str(tmp_path / "trace"), "log": str(tmp_path / "begun.log")}
    chance, stop, killed = random.Random(0), threading.Event(), []
    config = LauncherConfig(workers=2, threads=1)
    crew = LocalCrew(Task("tests.builders.launched:open_trace", arguments), tmp_path / "logs")

    def kill() -> None:
        while not stop.wait(5):
            killed.append(chance.choice(sorted(crew.pids.values())))
            os.kill(killed[-1], signal.SIGKILL)

    with Dispatcher(crew, workers=2, retries=config.retries) as dispatcher:
        dispatcher.begin()
        writer = TraceWriter(tmp_path / "trace", plan)
        threading.Thread(target=kill, daemon=True).start()
        outcome = dispatcher.run(list(plan.units))
        stop.set()
    outcome.require_all("parts")
    whole = make_trace(tmp_path / "whole", num_units=60, requests_per_unit=2)
    assert writer.finish().digest == whole.digest
    begun = (tmp_path / "begun.log").read_text().split()
    assert len(killed) >= 2
    assert len(begun) - len(set(begun)) <= len(killed), "more than one unit was done again"
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir()
    )


def test_local__gpus_are_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = LauncherConfig(workers=2, threads=3, gpus=2)
    entry = "tests.builders.launched:open_surroundings"
    with dispatcher_for(config, entry, {}, folder=tmp_path) as dispatcher:
        dispatcher.begin()
        found = dispatcher.run([f"u{i}" for i in range(8)]).results.values()
    assert {(one["gpus"], one["threads"]) for one in found} <= {("4,5", "3"), ("6,7", "3")}


@pytest.mark.engines
def test_ray__keeps_to_loopback_without_dashboard_and_with_a_token(ray_session: None) -> None:
    import ray

    assert ray.util.get_node_ip_address() == "127.0.0.1"
    listening = set()
    for one in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended
            listening |= {
                connection.laddr.ip.removeprefix("::ffff:")
                for connection in one.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            }
    assert listening == {"127.0.0.1"}
    assert not ray._private.worker.global_worker.node.webui_url
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(os.environ["RAY_AUTH_TOKEN"]) >= 32


JOIN = """
import json, sys
from collect.launch.config import LauncherConfig, LauncherKind
from collect.launch.ray import join
from collect.errors import LaunchError
try:
    join(LauncherConfig(kind=LauncherKind.RAY, address="127.0.0.1:9"))
except LaunchError as error:
    print(json.dumps([str(error), "ray" in sys.modules]))
"""


def test_ray__joins_a_cluster_with_a_token_only(tmp_path: Path) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", JOIN],
        cwd=ROOT,
        env=clean | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    told, imported = json.loads(done.stdout)
    assert "joined with a token, and there is none" in told
    assert "ray get-auth-token --generate" in told
    assert not imported, "nothing is reached before there is a token"


def test_slurm__without_a_cluster_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = LauncherConfig(kind=LauncherKind.SLURM, cluster="slurm")
    with pytest.raises(LaunchError, match=r"launcher\.cluster=local"):
        dispatcher_for(config, ENTRY, {}, folder=tmp_path)


def test_config__refuses_what_does_not_fit() -> None:
    with pytest.raises(MoecastError, match=r"launcher\.workers=0"):
        LauncherConfig(workers=0)
    with pytest.raises(MoecastError, match=r"launcher\.address=a:1 is for launcher=ray"):
        LauncherConfig(address="a:1")


def test_mailbox__messages_come_once_and_in_order(tmp_path: Path) -> None:
    one, other = Mailbox(tmp_path / "box"), Mailbox(tmp_path / "box")
    one.write("a")
    one.write("b")
    assert list(other.read()) == ["a", "b"]
    assert list(other.read()) == []
    one.write("c")
    assert list(other.read()) == ["c"]


def test_pulse__stops_when_the_dispatcher_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("collect.launch.mailbox.time.monotonic", lambda: now)
    monkeypatch.setattr("collect.launch.mailbox.time.sleep", lambda _: None)
    beat, pulse = Beat(tmp_path), Pulse(tmp_path, silence_seconds=50)
    for _ in range(10):
        now += 30
        beat.tell()
        assert pulse.is_felt()
    now += 49
    assert pulse.is_felt()
    now += 2
    assert not pulse.is_felt()
    assert Mailbox(tmp_path / "box").wait(pulse) is None
