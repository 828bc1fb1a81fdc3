"""A Ray cluster on this machine: a head and workers, each in namespaces of its own.

Needs root. A network namespace has its own addresses and ports. A process namespace hides the
other nodes' processes, as Ray looks for those of its node, and ends as one, as in a power cut.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.builders.processes import ROOT, run, write_moecast
from tests.docs.tested_commands import read_block

SMALL = f"--object-store-memory={80 << 20} --include-log-monitor=false"
START_SECONDS, STARTS = 150, 3
END_SECONDS = 60
INIT = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("started", flush=True)
sys.stdin.read()
"""
"""First process of a node: it reaps those whose parents end, and ends with the tests' process."""
NAMESPACES = Path("/run/netns")
"""Where `ip` mounts network namespaces by their names."""


class NoNamespaces(RuntimeError):
    """This user or machine cannot make namespaces; the message says why."""


@dataclass
class RayNode:
    """One node: a network and a process namespace, with everything that runs in them."""

    namespace: str
    address: str
    folder: Path
    """Ray's temporary folder."""
    environment: dict[str, str]
    _machine: subprocess.Popen | None = None
    """`unshare`, whose only child is the first process of the process namespace."""

    def boot(self) -> None:
        """Makes the process namespace, with its own /proc and nothing that runs.

        Raises:
            NoNamespaces: this machine cannot make them; `unshare` has printed why.
        """
        unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = ["ip", "netns", "exec", self.namespace, *unshare, sys.executable, "-c", INIT]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._machine = subprocess.Popen(command, **pipes)
        if self._machine.stdout.readline() != b"started\n":
            raise NoNamespaces("unshare --pid --mount-proc has failed")

    def command(self, *arguments: str | Path) -> list[str]:
        """Returns the arguments that run a command on this node, as the child of `nsenter`."""
        assert self._machine is not None, f"{self.namespace} was killed and not started since"
        (first,) = psutil.Process(self._machine.pid).children()
        enter = ["nsenter", f"--target={first.pid}", "--net", "--pid", "--mount", "--wd=."]
        return [*enter, *map(str, arguments)]

    def start(self, block: str, options: str, *, head: str = "") -> None:
        """Runs a block of docs/distributed.md; its last command starts Ray in the background."""
        head_port = {"HEAD:6379": f"{head}:6379"}
        lines = [command.adapt(head_port) for command in read_block("distributed.md", block)]
        lines[-1] += f" --node-ip-address={self.address} --temp-dir={self.folder} {SMALL} {options}"
        script = "\n".join(lines)
        log = self.folder.with_suffix(".log")
        for _ in range(STARTS):
            # A file, not a pipe, which would stay open until Ray ends.
            with log.open("a") as file:
                streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                command = self.command("bash", "-euc", script)
                process = subprocess.Popen(command, env=self.environment, **streams)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it is killed with the node
                if process.wait(START_SECONDS) == 0:
                    return
            # On a busy machine it may miss Ray's own limit of 30 seconds.
            self.kill()
            process.wait(END_SECONDS)
            self.boot()
        raise AssertionError(f"{script}\n{log.read_text()}")

    def processes(self) -> list[psutil.Process]:
        """Returns all processes on this node."""
        found = []
        for pid in run_ip("netns", "pids", self.namespace).split():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                found.append(psutil.Process(int(pid)))
        return found

    def kill(self) -> None:
        """Kills everything on this node at once, as a power cut does."""
        if self._machine is not None:
            self._machine.kill()
            self._machine.communicate()
            self._machine = None
        _, alive = psutil.wait_procs(self.processes(), timeout=END_SECONDS)
        assert not alive

    def unplug(self) -> None:
        """Cuts the node from the network: packets are lost, and no connection is closed."""
        run_ip("-n", self.namespace, "link", "set", "eth0", "down")

    def plug(self) -> None:
        """Connects the node to the network."""
        run_ip("-n", self.namespace, "link", "set", "eth0", "up")
        # Ray looks which address it would have towards the internet; nothing is sent there.
        run_ip("-n", self.namespace, "route", "replace", "default", "dev", "eth0")

    @property
    def is_alive(self) -> bool:
        is_connected = bool(run_ip("-n", self.namespace, "link", "show", "eth0", "up"))
        return is_connected and any(read_name(one) == "raylet" for one in self.processes())


@dataclass(frozen=True)
class RayNodes:
    """A running cluster."""

    head: RayNode
    workers: Sequence[RayNode]
    gpus: int
    """GPUs that the last worker declares."""
    gateway: str
    """Address of this machine in the nodes' network."""

    @property
    def nodes(self) -> Sequence[RayNode]:
        return (self.head, *self.workers)

    def start(self) -> None:
        """Starts Ray anew on all nodes: a new head does not know the workers of the old one."""
        for node in self.nodes:
            node.kill()
        self.start_head()
        self.revive()

    def start_head(self) -> None:
        self.head.boot()
        self.head.start("ray-head", "--num-cpus=0 --include-dashboard=false")

    def revive(self) -> None:
        """Starts Ray on workers that do not run, or were cut from the network."""
        if not self.head.is_alive:
            self.start()
        with ThreadPoolExecutor() as threads:
            list(threads.map(self._revive, self.workers))

    def _revive(self, node: RayNode) -> None:
        if node.is_alive:
            return
        node.kill()
        node.boot()
        node.plug()
        num_gpus = self.gpus if node is self.workers[-1] else 0
        # Ray wants to see as many as are declared.
        node.environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(num_gpus)))
        node.start("ray-node", f"--num-cpus=1 --num-gpus={num_gpus}", head=self.head.address)


@contextmanager
def ray_nodes(num_workers: int = 3, *, gpus: int = 0) -> Iterator[RayNodes]:
    """Starts a cluster with the commands of docs/distributed.md; at the end nothing of it is left.

    The head declares no CPU and each worker one, so that all work is on the workers.

    Args:
        gpus: GPUs that the last worker declares, whether the machine has them or not.

    Raises:
        NoNamespaces: this user or machine cannot make namespaces.
    """
    remove_leftovers()
    name = f"ray{os.getpid()}"
    with ExitStack() as stack:
        if not are_namespaces_mounted():
            stack.callback(unmount_namespaces)
        # Short: it begins the paths of Ray's sockets, which may have 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir="/tmp"))
        stack.callback(shutil.rmtree, folder)
        environment = make_environment(folder)
        subnet = make_bridge(name, stack)
        nodes = []
        for number in range(num_workers + 1):
            namespace, address = f"{name}-{number}", f"{subnet}.{number + 2}"
            make_namespace(namespace, address, bridge=name, number=number, stack=stack)
            nodes.append(RayNode(namespace, address, folder / str(number), dict(environment)))
            nodes[-1].plug()
        for node in nodes:
            stack.callback(node.kill)
        cluster = RayNodes(nodes[0], nodes[1:], gpus, f"{subnet}.1")
        cluster.start()
        yield cluster


def remove_leftovers() -> None:
    """Removes the clusters of test processes that were killed; their ids are in the names."""
    for namespace, owner in re.findall(r"^((ray\d+)-\d+)\b", run_ip("netns", "list"), re.MULTILINE):
        if psutil.pid_exists(int(owner.removeprefix("ray"))):
            continue
        # Its processes have ended with the tests' process.
        run_ip("netns", "delete", namespace)
        if re.search(rf"\b{owner}:", run_ip("link", "show", "type", "bridge")):
            run_ip("link", "delete", owner)
        for folder in Path("/tmp").glob(f"{owner}-*"):
            shutil.rmtree(folder)
        unmount_namespaces()


def are_namespaces_mounted() -> bool:
    # A folder that is mounted onto itself has the device of the one above: `is_mount` says no.
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[4] == str(NAMESPACES) for line in mounts)


def unmount_namespaces() -> None:
    """Removes the mount that the first `ip netns add` of a machine leaves, unless it is in use."""
    if are_namespaces_mounted() and not any(NAMESPACES.iterdir()):
        subprocess.run(["umount", NAMESPACES], check=True)
        NAMESPACES.rmdir()


def make_environment(home: Path) -> dict[str, str]:
    """Returns the environment of all nodes: one home folder, and this project's commands."""
    programs = write_moecast(home / "bin").parent
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    places = {"HOME": str(home), "PATH": path, "PYTHONPATH": str(ROOT)}
    return {**kept, **places, "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0"}


def make_bridge(name: str, stack: ExitStack) -> str:
    """Makes the network between the nodes; returns the first three numbers of its addresses."""
    # A private network that is not used on this machine; this machine itself is number 1.
    used = run_ip("-4", "route", "show")
    subnet = next(found for i in range(256) if f"{(found := f'10.213.{i}')}." not in used)
    run_ip("link", "add", name, "type", "bridge")
    stack.callback(run_ip, "link", "delete", name)
    run_ip("address", "add", f"{subnet}.1/24", "dev", name)
    run_ip("link", "set", name, "up")
    return subnet


def make_namespace(namespace: str, address: str, *, bridge: str, number: int, stack: ExitStack):
    run_ip("netns", "add", namespace)
    stack.callback(run_ip, "netns", "delete", namespace)
    outside = f"{bridge}v{number}"
    run_ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    # Gone at once: with its namespace it would go some time later.
    stack.callback(run_ip, "link", "delete", outside)
    run_ip("link", "set", outside, "master", bridge, "up")
    run_ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
    run_ip("-n", namespace, "link", "set", "lo", "up")


def run_ip(*arguments: str) -> str:
    program = shutil.which("ip")
    if program is None:
        raise NoNamespaces("`ip` is missing: apt-get install iproute2")
    done = run(program, *arguments, check=False)
    if done.returncode != 0:
        raise NoNamespaces(f"ip {' '.join(arguments)}: {done.stderr.strip()} (needs root)")
    return done.stdout


def read_name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""
