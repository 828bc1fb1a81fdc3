"""Serves several replicas behind Ray Serve: `moecast serve launcher=ray`."""

import asyncio
import logging
import os
import queue
import signal
import time
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.serve.api import RunTarget
from ray.serve.config import AutoscalingConfig, BackpressureConfig, HTTPOptions
from ray.serve.context import _get_global_client as get_serve_client
from ray.serve.schema import ApplicationStatus
from rich.console import Console
from starlette.types import ASGIApp

from predictors.errors import MoecastError
from runtime.engine.memory import share_one_heap
from runtime.profiling.facts import count_usable_cores
from runtime.serving.app import create_server
from runtime.serving.config import ServeConfig
from runtime.serving.errors import QueueFull
from runtime.serving.observe.tracing_settings import open_tracing
from runtime.serving.ray_cluster import (
    HeadLost,
    HeadWatch,
    describe_nodes,
    describe_resources,
    find_cause,
    fits_a_node,
    join,
    keep_to_loopback,
)
from runtime.serving.server import ServiceManager
from runtime.serving.service import ServiceState

APPLICATION = "moecast"
SPARE_REQUESTS = 64
"""Requests that a replica accepts beyond those that run and wait: health checks, model lists, and
those that its own queue rejects with 429."""
HEALTH_SECONDS = 5.0
"""Interval of Ray's health checks."""
LOAD_POLL_SECONDS = 0.05
STATUS_POLL_SECONDS = 0.5
SCALE_UP_SECONDS = 10.0
"""Requests must have been too many for so long before Ray starts another replica."""
LOOK_BACK_SECONDS = 15.0
"""Time over which Ray takes the mean of requests; replicas report them every 10 seconds."""
SHUTDOWN_SECONDS = 5.0
"""Time beyond `grace` before Ray kills a replica that does not end."""


class ReplicasFailed(MoecastError):
    """Ray could not start the replicas."""


class ServerReplica:
    """The server's application and engine thread, without a socket: Ray Serve owns the port.

    Args:
        revision: number of the deployment; a new number makes Ray replace every replica.

    Raises:
        MoecastError: the model cannot be loaded.
    """

    def __init__(self, config: ServeConfig, keys: frozenset[str], version: str, revision: int):
        share_one_heap()
        if config.ray_address is None:
            keep_to_loopback()
        self.revision = revision
        self._grace = config.grace
        self._tracing = open_tracing(os.environ, version=version)
        self._service, self._app = create_server(
            config, keys=keys, version=version, tracing=self._tracing
        )

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Load the model, then return the application; Ray calls this once per replica."""
        self._service.start()
        while self._service.state is ServiceState.LOADING:
            await asyncio.sleep(LOAD_POLL_SECONDS)
        if self._service.error is not None:
            raise self._service.error
        return self._app

    def check_health(self) -> None:
        """Tell Ray whether to replace this replica.

        Raises:
            RuntimeError: the engine thread has ended.
        """
        if not self._service.is_alive:
            raise RuntimeError(f"the engine has ended: {self._service.error}")

    async def __del__(self) -> None:
        """Finish accepted requests within the grace period; Ray awaits this before the exit."""
        self._service.drain()
        await asyncio.to_thread(self._service.wait_idle, self._grace)
        await asyncio.to_thread(self._service.close, timeout_seconds=2.0)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


class ReplicaSet:
    """One Ray Serve application with `config.replicas` or more replicas of the server.

    On a cluster it takes over the replicas of a command that was killed.

    Raises:
        ClusterError: no Ray, no token, or no such cluster.
        ReplicasFailed: the port is taken, or the cluster serves something else.
    """

    def __init__(self, config: ServeConfig, keys: frozenset[str], version: str):
        self._config, self._keys, self._version = config, keys, version
        self._revision = 0
        self._is_lost = False
        # An equal share of this machine's cores for each replica.
        share = max(1, count_usable_cores() // config.most_replicas)
        self._cpus = config.replica_cpus or share
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        self._owns_ray = join(
            config.ray_address, num_cpus=self._cpus * config.most_replicas, option="ray_address"
        )
        has_gpu = ray.cluster_resources().get("GPU", 0) > 0
        self._gpus = config.replica_gpus
        if self._gpus is None:
            self._gpus = 1 if has_gpu and config.device != "cpu" else 0
        try:
            self._watch = HeadWatch(config.ray_address)
            check_cluster_is_free(config)
            serve.start(
                http_options=HTTPOptions(
                    host=config.host, port=config.port, location="HeadOnly", request_timeout_s=None
                )
            )
        except (ray.exceptions.RayError, TimeoutError, RuntimeError) as error:
            ray.shutdown()
            raise ReplicasFailed(
                f"host={config.host} port={config.port}: Ray Serve cannot listen there "
                f"({one_line(error)}); choose another port"
            ) from error
        except (HeadLost, ReplicasFailed):
            ray.shutdown()
            raise

    def check_room(self) -> None:
        """Warn if no node of the cluster has room for a replica: Ray waits until one has.

        Raises:
            ReplicasFailed: this machine has none, and it will not grow.
        """
        needs = {"CPU": self._cpus} | ({"GPU": self._gpus} if self._gpus else {})
        if fits_a_node(needs):
            return
        message = f"no node has room for a replica: each needs {describe_resources(needs)}"
        if self._config.ray_address is None:
            raise ReplicasFailed(f"{message}; this machine has {describe_nodes()}")
        Console(stderr=True).print(
            f"{message}; the cluster's nodes have {describe_nodes()}",
            highlight=False,
            soft_wrap=True,
        )

    def deploy(self) -> None:
        """Start the replicas, or replace the running ones one after another.

        A replaced replica finishes the requests that it accepted; none is rejected meanwhile.
        Returns before they run: see `are_running`.

        Raises:
            ReplicasFailed: with Ray's message.
        """
        self._revision += 1
        config = self._config
        deployment = serve.deployment(
            serve.ingress()(ServerReplica),
            name="server",
            num_replicas=None if config.max_replicas else config.replicas,
            autoscaling_config=make_autoscaling(config),
            # The server's own queue rejects what it cannot hold, with 429.
            max_ongoing_requests=config.max_accepted + SPARE_REQUESTS,
            max_queued_requests=config.most_replicas * config.max_accepted,
            backpressure_config=BackpressureConfig(
                status_code=QueueFull.status, retry_after_s=QueueFull.retry_after_seconds
            ),
            health_check_period_s=HEALTH_SECONDS,
            graceful_shutdown_timeout_s=config.grace + SHUTDOWN_SECONDS,
            graceful_shutdown_wait_loop_s=0.2,
            ray_actor_options={"num_cpus": self._cpus, "num_gpus": self._gpus},
        )
        application = deployment.bind(config, self._keys, self._version, self._revision)
        try:
            serve.run_many(
                [RunTarget(application, name=APPLICATION)], wait_for_applications_running=False
            )
        except (ray.exceptions.RayError, TimeoutError, RuntimeError) as error:
            raise ReplicasFailed(f"the replicas did not start: {one_line(error)}") from error

    def are_running(self) -> bool:
        """Whether all replicas of the last `deploy` have started.

        Raises:
            ReplicasFailed: they cannot, with what the constructor of one raised. Those of the
                deployment before it go on.
        """
        application = serve.status().applications.get(APPLICATION)
        if application is None:
            raise ReplicasFailed("the replicas did not start: another command has ended them")
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            messages = [deployment.message for deployment in application.deployments.values()]
            cause = find_cause("\n".join(messages)) or application.message
            raise ReplicasFailed(f"the replicas did not start: {one_line(cause)}")
        return application.status == ApplicationStatus.RUNNING

    def check_head(self) -> None:
        """Ask the cluster's head whether it is there, unless that was done a moment ago.

        Raises:
            HeadLost: Ray was left already.
        """
        try:
            self._watch.check()
        except HeadLost as error:
            # Nothing can be deleted without a head; Ray ends the replicas.
            self._is_lost = True
            if self._owns_ray:
                ray.shutdown()
            raise HeadLost(
                f"{error}. Its replicas end too; start the cluster again (on each node ray stop "
                "--force, then ray start), then run the same command"
            ) from error

    def close(self) -> None:
        """Finish accepted requests, then stop Ray Serve unless it serves something else by now.

        Ctrl-C ends this at once. A cluster's replicas then finish their requests by themselves.
        """
        if self._is_lost:
            return
        with suppress(KeyboardInterrupt):
            serve.delete(APPLICATION)
            if not serve.status().applications:
                serve.shutdown()
        if self._owns_ray:
            ray.shutdown()


def check_cluster_is_free(config: ServeConfig) -> None:
    """Check that Ray Serve does not run on the cluster, or is what this command would start.

    Raises:
        ReplicasFailed: it serves another application, or listens at another address.
    """
    client = get_serve_client(raise_if_no_controller_running=False)
    if client is None:
        return
    others = sorted(set(serve.status().applications) - {APPLICATION})
    if others:
        raise ReplicasFailed(
            f"ray_address={config.ray_address}: this cluster already serves {', '.join(others)}, "
            "and has one port for all; delete it, or use another cluster"
        )
    running = client.http_config
    if (running.host, running.port) != (config.host, config.port):
        raise ReplicasFailed(
            f"ray_address={config.ray_address}: Ray Serve already listens at host={running.host} "
            f"port={running.port} of this cluster; use these to replace its replicas"
        )


def make_autoscaling(config: ServeConfig) -> AutoscalingConfig | None:
    if config.max_replicas is None:
        return None
    return AutoscalingConfig(
        min_replicas=config.replicas,
        max_replicas=config.max_replicas,
        # More than these wait in a replica's queue.
        target_ongoing_requests=config.max_running,
        look_back_period_s=LOOK_BACK_SECONDS,
        upscale_delay_s=SCALE_UP_SECONDS,
        downscale_delay_s=config.scale_down_seconds,
    )


def one_line(error: Exception | str) -> str:
    return " ".join(str(error).split())[:600]


def run(config: ServeConfig, keys: frozenset[str], version: str) -> dict[str, Any]:
    """Serve until SIGTERM or Ctrl-C; SIGHUP replaces all replicas, one after another.

    A second SIGTERM or Ctrl-C does not wait for accepted requests.

    Raises:
        KeyboardInterrupt: at one of these signals before the replicas run.
    """
    console, manager = Console(), ServiceManager(os.environ)
    replicas = ReplicaSet(config, keys, version)
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    # Ray waits for ever if no node has room: until the replicas run, SIGTERM ends that as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda number, _: signals.put(number))
    try:
        replicas.check_room()
        replicas.deploy()
        while not replicas.are_running():
            time.sleep(STATUS_POLL_SECONDS)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: signals.put(number))
        most = "" if config.max_replicas is None else f" to {config.max_replicas}"
        console.print(
            f"{config.served_names[0]} at http://{config.host}:{config.port}/v1 "
            f"({config.replicas}{most} replicas)",
            highlight=False,
            soft_wrap=True,
        )
        manager.on_state(ServiceState.READY)
        updates, last = serve_until_ended(signals, replicas, manager)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler)
        manager.on_state(ServiceState.DRAINING)
        replicas.close()
    return {
        "model": config.model.name,
        "replicas": config.replicas,
        "updates": updates,
        "ended": signal.Signals(last).name,
    }


def serve_until_ended(
    signals: "queue.SimpleQueue[int]", replicas: ReplicaSet, manager: ServiceManager
) -> tuple[int, int]:
    """Update the replicas at each SIGHUP; returns the number of updates and the signal that ends.

    After an update that fails, the replicas before it go on.

    Raises:
        HeadLost: the cluster's head is lost.
    """
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    updates, is_updating = 0, False
    while True:
        number = 0
        # Python runs signal handlers only between two short waits.
        try:
            number = signals.get(timeout=STATUS_POLL_SECONDS)
        except queue.Empty:
            replicas.check_head()
            manager.tick(lambda: True)
        else:
            if number != signal.SIGHUP:
                return updates, number
            console.print("replacing the replicas")
        try:
            if number == signal.SIGHUP:
                replicas.deploy()
                is_updating = True
            if is_updating and replicas.are_running():
                is_updating, updates = False, updates + 1
                console.print("replaced")
        except ReplicasFailed as error:
            is_updating = False
            errors.print(
                f"the update failed, and the replicas before it go on ({error}); mend this, then "
                "send SIGHUP again",
                markup=False,
                soft_wrap=True,
            )
