"""Ray Serve around replicas: started, replaced one after another, ended."""

import logging
import queue
import signal
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig
from rich.console import Console

from predictors.errors import MoecastError
from runtime.budget import parse_size
from runtime.profiling.facts import usable_cores
from runtime.ray_cluster import join
from runtime.serving.config import ServeConfig
from runtime.serving.opening import name_of
from runtime.serving.replicas.engine import Engine
from runtime.serving.replicas.ingress import Ingress
from runtime.serving.replicas.router import ExpertRouter
from runtime.serving.replicas.shape import shape_of
from runtime.store.model_source import resolve

APPLICATION = "moecast"
SPARE_REQUESTS = 8
"""Beside those that generate, a replica answers so many others (health, models) at once."""
STATS_SECONDS = 1.0
"""How often replicas tell routers what is resident."""
HEALTH_SECONDS = 5.0
"""How often their health is asked for."""


class ReplicasFailed(MoecastError):
    """Ray could not bring the replicas up."""


class Replicas:
    """One application: an ingress, and replicas of the server behind it.

    Raises:
        ClusterError: no Ray, no token, or no such cluster.
    """

    def __init__(self, config: ServeConfig, keys: frozenset[str], version: str):
        self._config, self._keys, self._version = config, keys, version
        self._edition = 0
        self._shape = shape_of(resolve(config.model))
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        self._own = join(config.cluster, num_cpus=self._cpus * config.replicas, option="cluster")
        try:
            serve.start(
                http_options=HTTPOptions(
                    host=config.host, port=config.port, location="HeadOnly", request_timeout_s=None
                )
            )
        except (ray.exceptions.RayError, TimeoutError, RuntimeError) as error:
            ray.shutdown()
            raise ReplicasFailed(
                f"host={config.host} port={config.port}: Ray Serve does not listen there "
                f"({one_line(error)}); choose another port"
            ) from error

    @property
    def _cpus(self) -> int:
        """Of each replica: this machine's, divided among them."""
        return max(1, usable_cores() // self._config.replicas)

    def deploy(self) -> None:
        """Brings replicas up.

        Those of before are replaced one after another, each ends when it has completed what it
        accepted, and no request is refused for it.

        Raises:
            ReplicasFailed: with what Ray says of it.
        """
        self._edition += 1
        try:
            serve.run(self._application(), name=APPLICATION, route_prefix="/")
        except (ray.exceptions.RayError, TimeoutError, RuntimeError) as error:
            raise ReplicasFailed(f"the replicas did not come up: {one_line(error)}") from error

    def _application(self) -> Any:
        config = self._config
        num_layers, num_experts = self._shape
        routing = RequestRouterConfig(
            request_router_class=ExpertRouter,
            request_router_kwargs={
                "routing": config.routing,
                "num_layers": num_layers,
                "num_experts": num_experts,
                "max_running": config.max_running,
                "max_waiting": config.max_waiting,
            },
            request_routing_stats_period_s=STATS_SECONDS,
        )
        ending = {
            "graceful_shutdown_timeout_s": config.grace + 5,
            "graceful_shutdown_wait_loop_s": 0.2,
        }
        engine = serve.deployment(
            Engine,
            name="engine",
            num_replicas=config.replicas,
            max_ongoing_requests=config.max_running + SPARE_REQUESTS,
            max_queued_requests=config.max_waiting,
            health_check_period_s=HEALTH_SECONDS,
            request_router_config=routing,
            ray_actor_options={
                "num_cpus": self._cpus,
                "num_gpus": 0 if config.device == "cpu" or not has_gpu() else 1,
            },
            **ending,
        ).bind(config, self._keys, self._version, self._edition)
        return serve.deployment(
            Ingress,
            name="ingress",
            max_ongoing_requests=config.replicas * (config.max_running + config.max_waiting)
            + SPARE_REQUESTS,
            ray_actor_options={"num_cpus": 0},
            **ending,
        ).bind(
            engine,
            name=config.model.name,
            folder=str(resolve(config.model)),
            kind=config.forecaster,
            max_body_bytes=parse_size(config.max_body, name="max_body"),
            is_alone=config.cluster is None,
        )

    def close(self) -> None:
        """What was accepted is completed first."""
        serve.delete(APPLICATION)
        serve.shutdown()
        if self._own:
            ray.shutdown()


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:600]


def has_gpu() -> bool:
    """Whether the cluster has any."""
    return ray.cluster_resources().get("GPU", 0) > 0


def run(config: ServeConfig, keys: frozenset[str], version: str) -> dict[str, Any]:
    """Serves until SIGTERM or Ctrl-C; SIGHUP replaces all replicas, one after another."""
    console = Console()
    replicas = Replicas(config, keys, version)
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: signals.put(number))
    try:
        replicas.deploy()
        console.print(
            f"{name_of(config)} at http://{config.host}:{config.port}/v1 "
            f"({config.replicas} replicas, {config.routing})",
            highlight=False,
            soft_wrap=True,
        )
        updates = 0
        while (last := wait(signals)) == signal.SIGHUP:
            console.print("replacing the replicas", highlight=False)
            replicas.deploy()
            updates += 1
            console.print("replaced", highlight=False)
    finally:
        replicas.close()
    return {
        "model": name_of(config),
        "replicas": config.replicas,
        "routing": config.routing,
        "updates": updates,
        "ended": signal.Signals(last).name,
    }


def wait(signals: "queue.SimpleQueue[int]") -> int:
    """The next signal; a moment at a time, for the handlers run between two."""
    while True:
        try:
            return signals.get(timeout=0.5)
        except queue.Empty:
            continue
