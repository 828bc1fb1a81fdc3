"""Starts Ray on this machine, or joins a cluster.

Anyone who reaches Ray's ports can run code. Therefore a Ray that is started here listens on
loopback only, without its dashboard, and a cluster is joined only by its address and with a token.
"""

import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from predictors.errors import MoecastError
from predictors.files import expand_home

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("predictors", "zoo", "runtime", "collect", "train")
OBJECT_STORE_BYTES = 80 << 20
"""About Ray's minimum; this project passes nothing through the object store."""
PROXY_TIMEOUTS = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
"""By default Ray Serve kills a proxy that does not start within five seconds or answer within ten,
which is too short while models are loading."""
LOOPBACK = "127.0.0.1"
EXTERNAL_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0, Ray binds all its ports to loopback; Ray reads it when it is imported. The argument
`_node_ip_address="127.0.0.1"` is not enough: Ray 2.60 replaces it by the machine's external address
and listens on every interface."""

HEAD_SECONDS = 40.0
"""A head that has not answered for this time is lost. After 60 seconds Ray ends its nodes, and this
process too, from C++ and without our message."""
HEAD_POLL_SECONDS = 5.0
"""Interval of these questions, and the time that each may take."""


class ClusterError(MoecastError):
    """Ray is not installed, the token is missing, or there is no cluster at the address."""


class HeadLost(ClusterError):
    """The cluster's head has ended, is cut off, or was started again without its state."""

    # Ray's threads are still connected to it, and crash at times when Python ends.
    ends_process = True


def prepare(address: str | None) -> None:
    """Set the environment variables that Ray reads when it is imported; call this before.

    Raises:
        ClusterError: Ray is not installed, or there is no token for the cluster at `address`.
    """
    if find_spec("ray") is None:
        raise ClusterError("this needs Ray: pip install 'moecast[ray]'")
    # No network use without the user's request.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_AUTH_MODE"] = "token"
    for name, seconds in PROXY_TIMEOUTS.items():
        os.environ.setdefault(name, seconds)
    if address is None:
        os.environ.setdefault(EXTERNAL_VARIABLE, "0")
        # A token for this run only; otherwise Ray writes one to the user's home folder.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        return
    file = expand_home(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token"))
    if not os.environ.get("RAY_AUTH_TOKEN") and not file.is_file():
        raise ClusterError(
            "missing token to join a Ray cluster: set RAY_AUTH_TOKEN_PATH to the cluster's token "
            f"file, or put the token in {file} (ray get-auth-token --generate creates one; start "
            "the cluster with RAY_AUTH_MODE=token)"
        )


def join(address: str | None, *, num_cpus: int, option: str) -> bool:
    """Start Ray on this machine, or join the cluster at `address`.

    Returns False if this process has already joined, and will leave by itself.

    Args:
        num_cpus: CPUs that Ray may allocate on this machine.
        option: the user's option for the address, for error messages.

    Raises:
        ClusterError: Ray is not installed or was imported without a token, the token is missing,
            or there is no cluster at the address.
    """
    imported = sys.modules.get("ray")
    if imported is not None and imported.is_initialized():
        return False
    if imported is not None and os.environ.get("RAY_AUTH_MODE") != "token":
        raise ClusterError(
            "Ray was already imported without a token, and reads its settings only once: set "
            "RAY_AUTH_MODE=token before importing Ray"
        )
    prepare(address)
    import ray

    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "ERROR",
        "runtime_env": {"worker_process_setup_hook": make_worker_hook()},
    }
    if address is not None:
        try:
            ray.init(address=address, **options)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ClusterError(
                f"{option}={address}: cannot join a Ray cluster there "
                f"({' '.join(str(error).split())[:300]}). Start one with RAY_AUTH_MODE=token ray "
                "start --head, or leave the address out to use this machine"
            ) from error
        return True
    ray.init(
        # "local" ignores RAY_ADDRESS: a cluster is joined only by the command line.
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        **options,
    )
    if ray.util.get_node_ip_address() != LOOPBACK:
        ray.shutdown()
        raise ClusterError(
            "Ray would listen beyond this machine: it was imported too early, or "
            f"{EXTERNAL_VARIABLE} is 1. Unset it, or name a cluster with {option}"
        )
    return True


def describe_resources(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def read_nodes() -> list[dict[str, float]]:
    """Return the resources of each node of the joined cluster."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def fits_a_node(needs: Mapping[str, float]) -> bool:
    """Return whether some node would have room for a worker if it did nothing else."""
    return any(
        all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in read_nodes()
    )


def describe_nodes() -> str:
    """Return the CPUs and GPUs of each node of the joined cluster."""
    return "; ".join(
        describe_resources({name: node.get(name, 0) for name in ("CPU", "GPU")})
        for node in read_nodes()
    )


def find_cause(message: str) -> str:
    """Return what the last exception of a traceback says, without its class."""
    return re.split(r"^[\w.]+: ", message, flags=re.MULTILINE)[-1].strip()


class HeadWatch:
    """Notices that the head of the joined cluster is lost; Ray's own calls may then wait for ever.

    A head that was started again has another session. It knows no node, actor or job of the old
    one, so that what this process started is lost too.
    """

    def __init__(self, address: str | None):
        """Asks the head for its session.

        Raises:
            HeadLost: it does not answer.
        """
        self._address = address or "this machine"
        self._asked = self._answered = time.monotonic()
        session = self._read_session()
        if session is None:
            raise HeadLost(f"the head of the Ray cluster at {self._address} does not answer")
        self._session = session

    def check(self, *, at_once: bool = False) -> bool:
        """Asks the head, unless that was done a moment ago; takes five seconds at most.

        Returns whether it has answered the last time.

        Raises:
            HeadLost: it has not answered for `HEAD_SECONDS`, or is another one.
        """
        if not at_once and time.monotonic() - self._asked < HEAD_POLL_SECONDS:
            return self._asked == self._answered
        session = self._read_session()
        self._asked = time.monotonic()
        if session == self._session:
            self._answered = self._asked
            return True
        if session is not None:
            raise HeadLost(
                f"the head of the Ray cluster at {self._address} was started again, and knows "
                "nothing of what ran before"
            )
        silent = self._asked - self._answered
        if silent > HEAD_SECONDS:
            raise HeadLost(
                f"the head of the Ray cluster at {self._address} has not answered for "
                f"{silent:.0f} seconds"
            )
        return False

    def _read_session(self) -> bytes | None:
        """Returns the name that a head chooses when it starts; None without an answer."""
        import ray
        from ray._private.worker import global_worker

        try:
            # Not ray.nodes(), which is answered from this process's memory.
            return global_worker.gcs_client.internal_kv_get(
                b"session_name", b"session", timeout=HEAD_POLL_SECONDS
            )
        except ray.exceptions.RayError as error:
            # A new head refuses this process as one of another cluster.
            return b"" if "WrongClusterID" in str(error) else None


def make_worker_hook() -> Callable[[], None]:
    """Return a function that prepares a new worker of Ray.

    It imports this project's packages. And it names the interface of the node's address for Gloo,
    with which processes of Ray Train exchange gradients: otherwise they meet at the address of the
    host's name, which on Debian is 127.0.1.1 on each machine.

    Ray puts the driver's current folder first on a worker's search path, and a user's `train.py`
    there would replace ours. Ray sends a nested function as its code, so that nothing needs to be
    imported to call it. Packages that are at another place on a cluster's machine are found there.
    """
    root, names = str(ROOT), [name for name in PACKAGES if find_spec(name) is not None]

    def prepare_worker() -> None:
        import importlib
        import os
        import sys

        import psutil
        import ray

        own = ray.util.get_node_ip_address()
        for interface, addresses in psutil.net_if_addrs().items():
            if own in (address.address for address in addresses):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        sys.path.insert(0, root)
        for name in names:
            importlib.import_module(name)
        sys.path.remove(root)

    return prepare_worker


def keep_to_loopback() -> None:
    """Make a replica of Ray Serve listen on loopback only; call this in the replica's constructor.

    Ray 2.60 binds the port between replicas on every interface, whatever hosts are configured.

    Raises:
        ClusterError: this version of Ray binds the port in another way.
    """
    from ray.serve._private import replica

    bind = getattr(replica, "add_port_to_grpc_server", None)
    if bind is None:
        raise ClusterError(
            "replicas of this Ray version would listen on every interface; install ray==2.60.0"
        )

    def bind_to_loopback(server: Any, address: str) -> int:
        return bind(server, address.replace("[::]", LOOPBACK))

    replica.add_port_to_grpc_server = bind_to_loopback
