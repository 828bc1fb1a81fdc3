"""Debian's Prometheus scrapes a running server; the commands are those of docs/monitoring.md."""

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
import yaml

from benchmarks.serving.server import ServerProcess, run_server
from runtime.serving.monitoring import SCRAPING
from tests.builders import monitoring
from tests.builders.entries import write_popularity
from tests.builders.pages import free_port
from tests.builders.processes import run
from tests.builders.served import serve
from tests.builders.server_load import asking
from tests.builders.serving import speaking_model
from tests.builders.waiting import wait_for
from tests.docs.pages import ROOT
from tests.docs.tested_commands import read_block

pytestmark = [pytest.mark.engines, pytest.mark.timeout(560)]

PATIENCE = 240.0
CASES = Path(__file__).with_name("alert_cases.yml")
SCRAPE_INTERVAL = "200ms"
"""The shipped 15 s would take minutes; every other setting is as shipped."""


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Runs the documented installation as root; without root, what it installs must be there."""
    commands = [command.adapt() for command in read_block("monitoring.md", "install")]
    is_there = all(map(shutil.which, ("prometheus", "promtool", "curl")))
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        if not is_there:
            pytest.skip(f"Prometheus is missing; as root on Debian: {' && '.join(commands)}")
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in commands:
        subprocess.run(command, shell=True, check=True, env=environment, timeout=PATIENCE)
    if not is_there and Path("/run/systemd/system").is_dir():
        # Debian starts the service of a package that it installs.
        stop = ["systemctl", "disable", "--now", "prometheus"]
        subprocess.run(stop, check=True, timeout=PATIENCE)


def test_alerts__fire_when_they_should_and_not_otherwise() -> None:
    fired = {
        name
        for case in yaml.safe_load(CASES.read_text())["tests"]
        for check in case["promql_expr_test"]
        for sample in check["exp_samples"]
        for name in re.findall(r'"(\w+)"', sample["labels"])
    }
    assert fired == {rule["alert"] for rule in monitoring.read_rules() if "alert" in rule}
    run("promtool", "test", "rules", CASES)


@dataclass
class Prometheus:
    """A running Prometheus."""

    url: str
    server: ServerProcess

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Returns labels and value of each series."""
        answer = httpx2.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30)
        body = answer.json()
        assert body["status"] == "success", body
        return [(one["metric"], float(one["value"][1])) for one in body["data"]["result"]]

    def wait(self, expression: str) -> None:
        """Waits until an expression returns something."""
        wait_for(lambda: self.query(expression), f"data of {expression}", pause=0.1)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Runs the documented commands next to a server; the last one until the end of the tests."""
    folder = tmp_path_factory.mktemp("prometheus")
    model = speaking_model(folder / "model", num_layers=3)
    with serve(model, budget="50%", predictor="skip").moecast as handle:
        spec = handle.spec
    # Its card claims that every forecast is right: it drifts.
    write_popularity(folder / "entry", spec, [1.0] * spec.num_layers)
    options = {"model.id": model, "budget": "50%", "predictor": folder / "entry"}
    # Forecasts that do not pay are turned off, and not compared with the card any more.
    options["system.adaptive"] = "false"
    port = free_port()
    with run_server(options, folder=folder) as server:
        serves, listens = server.url.removeprefix("http://"), f"127.0.0.1:{port}"
        here = {"127.0.0.1:8000": serves, "127.0.0.1:9090": listens}
        here["moecast "] = f"{sys.executable} -m moecast "
        block = read_block("monitoring.md", "prometheus")
        *commands, last = (command.adapt(here) for command in block)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        for command in commands:
            run("bash", "-o", "pipefail", "-c", command, folder=folder, environment=environment)
        path = folder / "monitoring" / SCRAPING
        config = path.read_text().replace("15s", SCRAPE_INTERVAL)
        path.write_text(config.replace("127.0.0.1:8000", serves))
        with (folder / "prometheus.log").open("w") as log:
            process = subprocess.Popen(last.split(), cwd=folder, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: is_ready(url, process), "Prometheus is ready", pause=0.1)
            yield Prometheus(url, server)
        finally:
            process.terminate()
            process.wait(PATIENCE)


def is_ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "it has ended"
    try:
        return httpx2.get(f"{url}/-/ready", timeout=30).status_code == 200
    except httpx2.ConnectError:
        return False  # it does not listen yet


def test_prometheus__has_data_for_every_query_and_alerts(prometheus: Prometheus) -> None:
    body = {"prompt": "The heart", "max_tokens": 100, "ignore_eos": True}

    def ask() -> None:
        url = f"{prometheus.server.api}/completions"
        assert httpx2.post(url, json=body, timeout=PATIENCE).status_code == 200

    with asking(8, ask):
        # Drift is judged after thousands of tokens: everything else has been scraped by then.
        prometheus.wait("moecast_predictor_accuracy")
        prometheus.wait('ALERTS{alertname="MoecastPredictorDrifted"}')
        empty = {}
        shown = monitoring.dashboard_expressions("1m") | monitoring.rule_expressions()
        for name, expression in shown.items():
            # With `bool` a comparison returns 0 or 1 in place of nothing where it does not hold.
            found = prometheus.query(re.sub(r" (==|<|>) ", r" \1 bool ", expression))
            if not found or all(math.isnan(value) for _, value in found):
                empty[name] = found
        # This server does not decide whether it prefetches.
        assert empty.keys() == {"Prefetching A"}
        for selector, label in monitoring.dashboard_variables().values():
            assert {labels[label] for labels, _ in prometheus.query(selector)}
    pending = {labels["alertname"] for labels, _ in prometheus.query("ALERTS")}
    assert "MoecastPredictorDrifted" in pending
    assert not pending & {"MoecastDown", "MoecastReadErrors", "MoecastPredictorFailed"}
    assert prometheus.server.stop().exit_code == 0
    prometheus.wait('ALERTS{alertname="MoecastDown"}')
