"""A Slurm cluster of three nodes on this machine, of Debian's packages; it needs root.

All files are in one folder, every port is on loopback. A node is a PID namespace, in which slurmd
is the first process: when it is killed, the kernel kills everything on the node.
"""

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.builders.processes import install_packages, run
from tests.builders.waiting import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "squeue", "srun")
INSTALL = "apt-get install -y --no-install-recommends munge slurmctld slurmd slurm-client"
POLICY = Path("/usr/sbin/policy-rc.d")
"""Debian's hook that decides whether the services of new packages are started."""
NODES = ("node1", "node2", "node3")
CPUS_PER_NODE = 2
GPU_NODE = "node3"
"""Declares a GPU that it does not have."""
PATIENCE_SECONDS = 180.0
MORTAL = ("setpriv", "--pdeathsig", "KILL", "--")
"""Before a command: it is killed when the thread that started it ends, however it ends."""
IN_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

CONFIG = """\
ClusterName=moecast
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
# A job that is requeued waits until its old credential has expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MpiDefault=none
# No cgroups, no accounting, and nodes with more cores than this machine has.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
# As on a cluster, only sooner: a node that is silent is down, a job that ignores SIGTERM is killed.
SlurmdTimeout=6
KillWait=2
MessageTimeout=2
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
{nodes}
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2
PartitionName=short Nodes=ALL MaxTime=30 PriorityTier=1
PartitionName=gpu Nodes={gpu_node} MaxTime=INFINITE PriorityTier=1
"""
GPUS = f"NodeName={GPU_NODE} Name=gpu File=/dev/null\n"
"""Slurm wants a device for each GPU."""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


def why_impossible() -> str | None:
    """Says why no cluster can be started here, or returns None."""
    if os.geteuid() != 0:
        return f"Slurm's tests need root; Debian's packages: {INSTALL}"
    if missing_programs() and shutil.which("apt-get") is None:
        return f"{', '.join(missing_programs())} is missing; on Debian: {INSTALL}"
    tried = run(*IN_NAMESPACE, "true", check=False)
    return f"a node is a PID namespace: {tried.stderr.strip()}" if tried.returncode else None


def install() -> None:
    """Installs the packages unless they are there; none of their services is started."""
    if not missing_programs():
        return
    is_ours = not POLICY.exists()
    if is_ours:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        install_packages(INSTALL)
    finally:
        if is_ours:
            POLICY.unlink()
    if Path("/run/systemd/system").is_dir():
        # Nor at the next start of the machine.
        services = ["munge", "slurmctld", "slurmd"]
        subprocess.run(["systemctl", "disable", *services], check=True, timeout=60)


@dataclass
class SlurmCluster:
    """The daemons of a running cluster."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """By name: munged, slurmctld, node1 to node3."""

    @property
    def config(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.config)}

    def run(self, *command: str) -> str:
        """Runs one of Slurm's commands and returns its output."""
        return run(*command, environment=self.environment, timeout=PATIENCE_SECONDS).stdout

    def jobs(self, *options: str) -> list[list[str]]:
        """Returns id, name, state and node of each job that squeue lists."""
        lines = self.run("squeue", "-h", "-r", "-o", "%i|%j|%T|%N", *options).splitlines()
        return [line.split("|") for line in lines]

    def start(self, name: str) -> None:
        """Starts a daemon."""
        here = str(self.folder)
        if name == "munged":
            files = [f"--{kind}-file={here}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
            # A folder of tests is not as strictly closed as munged likes it.
            command = ["munged", "--foreground", "--force", f"--socket={here}/munge.socket", *files]
        elif name == "slurmctld":
            command = ["slurmctld", "-D", "-f", str(self.config)]
        else:
            command = [*IN_NAMESPACE, "slurmd", "-D", "-N", name, "-f", str(self.config)]
        with (self.folder / f"{name}.out").open("ab") as output:
            options = {"env": self.environment, "stdout": output, "stderr": output}
            self.daemons[name] = subprocess.Popen([*MORTAL, *command], cwd=here, **options)

    def kill(self, name: str) -> None:
        """SIGKILL for a daemon; with a node's, for all that runs on the node."""
        process = self.daemons.pop(name)
        process.kill()
        process.wait(PATIENCE_SECONDS)

    def wait_until_idle(self) -> None:
        """Waits until all nodes are up and no job is left."""

        def is_idle() -> bool:
            states = self.run("sinfo", "-h", "-N", "-p", "cpu", "-o", "%N %T").split("\n")
            return all(f"{node} idle" in states for node in NODES) and not self.jobs()

        wait_for(is_idle, "idle nodes")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        return [stack.enter_context(server).getsockname()[1] for server in servers]


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Runs a cluster until the `with` block ends."""
    host = socket.gethostname().partition(".")[0]
    ports = free_ports(1 + len(NODES))
    for name in ("state", *NODES):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(64))
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE}"
        f"{' Gres=gpu:1' if node == GPU_NODE else ''}"
        for node, port in zip(NODES, ports[1:], strict=True)
    )
    cluster = SlurmCluster(folder)
    settings = {"host": host, "folder": folder, "ports": ports, "nodes": nodes}
    cluster.config.write_text(CONFIG.format(**settings, gpu_node=GPU_NODE))
    (folder / "gres.conf").write_text(GPUS)
    try:
        cluster.start("munged")
        wait_for((folder / "munge.socket").exists, "munged's socket")
        for name in ("slurmctld", *NODES):
            cluster.start(name)
        wait_for(lambda: is_answering(cluster), "slurmctld")
        cluster.wait_until_idle()
        yield cluster
    finally:
        for name in list(cluster.daemons):
            cluster.kill(name)


def is_answering(cluster: SlurmCluster) -> bool:
    return "is UP" in run("scontrol", "ping", environment=cluster.environment, check=False).stdout
