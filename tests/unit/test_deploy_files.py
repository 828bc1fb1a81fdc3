"""The files of examples/deploy agree with the options and the limits of `moecast serve`."""

import shlex
from dataclasses import fields
from pathlib import Path

import yaml

from runtime.policy.budget import parse_size
from runtime.serving.config import ServeConfig
from runtime.serving.middleware import OPEN_PATHS

DEPLOY = Path(__file__).resolve().parents[2] / "examples" / "deploy"
GRACE = ServeConfig.grace


def read_unit() -> dict[str, str]:
    lines = (DEPLOY / "moecast.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def read_options(arguments: list[str]) -> dict[str, str]:
    options = dict(argument.split("=", 1) for argument in arguments)
    assert options.keys() <= {field.name for field in fields(ServeConfig)}
    return options


def test_unit__limits_match_the_budget_and_the_grace_period() -> None:
    unit = read_unit()
    options = read_options(shlex.split(unit["ExecStart"])[2:])
    memory = parse_size(f"{unit['MemoryMax']}iB", name="MemoryMax")
    assert memory >= parse_size(options["budget"], name="budget") + (1 << 30)
    assert int(unit["TimeoutStopSec"]) > GRACE


def test_manifest__limits_probes_and_options_match_the_server() -> None:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = next(one for one in documents if one["kind"] == "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = read_options(container["args"])
    memory = parse_size(f"{container['resources']['limits']['memory']}B", name="memory")
    assert memory >= parse_size(options["budget"], name="budget") + (1 << 30)
    assert pod["terminationGracePeriodSeconds"] > GRACE
    probes = [container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")]
    assert len(probes) == 3
    assert set(probes) <= OPEN_PATHS
