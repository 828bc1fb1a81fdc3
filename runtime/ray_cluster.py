"""Ray, on this machine or on a cluster that was named.

Anyone who reaches Ray's ports can run code. So what is started here listens on loopback and shows
no dashboard; another cluster is joined only by its address, and with a token.
"""

import os
import secrets
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from predictors.errors import MoecastError

OBJECT_STORE_BYTES = 80 << 20
"""Ray's least, about; nothing of ours goes through its object store."""
PATIENCE = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
"""Ray Serve gives its proxy five seconds to start and ten to answer, then ends it: where models are
being loaded that is too little."""
LOOPBACK = "127.0.0.1"
ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Off, Ray binds all its ports to loopback. `_node_ip_address="127.0.0.1"` does not: Ray 2.60 turns
it into the machine's outward address and listens on every interface. Read when Ray is imported."""


class ClusterError(MoecastError):
    """No Ray, no token, or no such cluster."""


def prepare(address: str | None) -> None:
    """Sets what Ray reads from the environment when it is imported: to be called before that.

    Raises:
        ClusterError: no Ray, or no token for the cluster at `address`.
    """
    if find_spec("ray") is None:
        raise ClusterError("this needs Ray: pip install 'moecast[ray]'")
    # No network unless it is asked for.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_AUTH_MODE"] = "token"
    for name, seconds in PATIENCE.items():
        os.environ.setdefault(name, seconds)
    if address is None:
        os.environ.setdefault(ALONE, "0")
        # Of this run only; without it Ray would write one to the user's home folder.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    else:
        require_token()


def join(address: str | None, *, num_cpus: int, option: str) -> bool:
    """Starts Ray on this machine, or joins the cluster at `address`.

    False when this process has done so before, and will end it by itself.

    Args:
        num_cpus: that Ray hands out on this machine.
        option: what the user names an address with, for errors.

    Raises:
        ClusterError: no Ray, no token, no such cluster, or Ray was imported before without a token.
    """
    imported = sys.modules.get("ray")
    if imported is not None and imported.is_initialized():
        return False
    if imported is not None and os.environ.get("RAY_AUTH_MODE") != "token":
        raise ClusterError(
            "Ray was imported before this, without a token, and reads that once: set "
            "RAY_AUTH_MODE=token before Ray is imported, or import it later"
        )
    prepare(address)
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is not None:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ClusterError(
                f"{option}={address}: no Ray cluster can be joined there "
                f"({' '.join(str(error).split())[:300]}). Start one: RAY_AUTH_MODE=token ray start "
                "--head, or leave the address out to use this machine"
            ) from error
        return True
    ray.init(
        # Not that of RAY_ADDRESS: joining is said on the command line.
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        **quiet,
    )
    if ray.util.get_node_ip_address() != LOOPBACK:
        ray.shutdown()
        raise ClusterError(
            f"Ray does not keep to loopback here: it was imported before, or {ALONE} is set to 1. "
            f"Unset it, or name the cluster that is meant with {option}"
        )
    return True


def keep_to_loopback() -> None:
    """For a replica of Ray Serve, before it listens to other replicas: Ray 2.60 binds that port on
    every interface, whatever it is told of hosts.

    Raises:
        ClusterError: this Ray does it in another way.
    """
    from ray.serve._private import replica

    bind = getattr(replica, "add_port_to_grpc_server", None)
    if bind is None:
        raise ClusterError("replicas of this Ray would not keep to loopback; install ray==2.60.0")

    def bind_here(server: Any, address: str) -> int:
        return bind(server, address.replace("[::]", LOOPBACK))

    replica.add_port_to_grpc_server = bind_here


def require_token() -> None:
    """Raises ClusterError where there is no token to join a cluster with."""
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    if not os.environ.get("RAY_AUTH_TOKEN") and not file.is_file():
        raise ClusterError(
            "a Ray cluster is joined with a token, and there is none: set RAY_AUTH_TOKEN_PATH to "
            f"the cluster's token file, or put it in {file} (ray get-auth-token --generate makes "
            "one; start the cluster with RAY_AUTH_MODE=token)"
        )
