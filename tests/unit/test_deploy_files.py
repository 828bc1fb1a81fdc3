"""The files of examples/deploy agree with the options and the limits of `moecast serve`."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import yaml

from runtime.policy.budget import parse_size
from runtime.serving.config import ServeConfig
from runtime.serving.edge.middleware import OPEN_PATHS

DEPLOY = Path(__file__).resolve().parents[2] / "examples" / "deploy"
GRACE = ServeConfig.grace
RAY_CLUSTER = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
HEAD_GROUP = {"rayStartParams", "template"}
WORKER_GROUP = HEAD_GROUP | {"groupName", "replicas", "minReplicas", "maxReplicas"}
"""Fields of KubeRay's ray.io/v1 that the manifest uses; it rejects a key that it does not know."""


def read_unit() -> dict[str, str]:
    lines = (DEPLOY / "moecast.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def read_options(arguments: list[str]) -> dict[str, str]:
    options = dict(argument.split("=", 1) for argument in arguments)
    assert options.keys() <= {field.name for field in fields(ServeConfig)}
    return options


def spare_memory(limit: str, options: dict[str, str]) -> int:
    """Bytes of a limit that a server's budget leaves."""
    return parse_size(limit, name="limit") - parse_size(options["budget"], name="budget")


def test_unit__limits_match_the_budget_and_the_grace_period() -> None:
    unit = read_unit()
    options = read_options(shlex.split(unit["ExecStart"])[2:])
    assert spare_memory(unit["MemoryMax"], options) >= 1 << 30
    assert int(unit["TimeoutStopSec"]) > GRACE


def test_manifest__limits_probes_and_options_match_the_server() -> None:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = next(one for one in documents if one["kind"] == "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = read_options(container["args"])
    assert spare_memory(f"{container['resources']['limits']['memory']}B", options) >= 1 << 30
    assert pod["terminationGracePeriodSeconds"] > GRACE
    probes = [container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")]
    assert len(probes) == 3
    assert set(probes) <= OPEN_PATHS


def test_ray_cluster__fits_its_workers_and_the_server() -> None:
    cluster, service = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    head, (workers,) = spec["headGroupSpec"], spec["workerGroupSpecs"]
    assert (spec.keys(), head.keys()) == (RAY_CLUSTER, HEAD_GROUP)
    assert workers.keys() == WORKER_GROUP
    parameters = [*head["rayStartParams"].values(), *workers["rayStartParams"].values()]
    assert all(isinstance(value, str) for value in parameters)
    pinned = (DEPLOY.parents[1] / "constraints.txt").read_text()
    assert f"ray=={spec['rayVersion']}\n" in pinned

    (serving,) = head["template"]["spec"]["containers"]
    (worker,) = workers["template"]["spec"]["containers"]
    (command,) = re.findall(r"moecast serve ((?:.*\\\n)*.*)", serving["args"][0])
    options = read_options(shlex.split(command.replace("\\\n", "")))
    assert (options["launcher"], spec["authOptions"]) == ("ray", {"mode": "token"})
    # A replica on each worker.
    assert int(options["replicas"]) == workers["replicas"]
    assert int(options["replica_cpus"]) == int(worker["resources"]["limits"]["cpu"])
    assert spare_memory(f"{worker['resources']['limits']['memory']}B", options) >= 2 << 30

    assert serving["readinessProbe"]["httpGet"]["path"] in OPEN_PATHS
    ports = {port["name"]: port["containerPort"] for port in serving["ports"]}
    assert ports[serving["readinessProbe"]["httpGet"]["port"]] == int(options["port"])
    assert service["spec"]["ports"][0]["targetPort"] in ports
    (port,) = worker["ports"]
    assert str(port["containerPort"]) == workers["rayStartParams"]["node-manager-port"]
    for group in (head, workers):
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > GRACE
