"""A real systemd runs examples/deploy/moecast.service, in a container without a network."""

import re
import signal
from collections.abc import Iterator

import pytest

from tests.builders.serving import speaking_model
from tests.builders.systemd_container import NoSystemd, SystemdContainer, install, systemd_container
from tests.builders.waiting import wait_for
from tests.docs.pages import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

UNIT = ROOT / "examples" / "deploy" / "moecast.service"
SERVICE = "moecast"
KEY = "a-key"
OTHERS_BYTES = 1 << 30
"""What the unit's memory limit allows for Python and pages of files."""


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SystemdContainer]:
    folder = tmp_path_factory.mktemp("systemd")
    model = speaking_model(folder / "model")
    # The service's user owns no files.
    for path in model.iterdir():
        path.chmod(0o644)
    try:
        install()
        with systemd_container(folder / "machine", binds={model: "/srv/models/moe"}) as running:
            running.install_moecast()
            running.write("/etc/moecast/api-key", KEY, mode="600")
            running.write("/etc/systemd/system/moecast.service", UNIT.read_text())
            yield running
    except NoSystemd as error:
        pytest.skip(f"the unit is not run: {error}")


@pytest.fixture
def started(container: SystemdContainer) -> Iterator[SystemdContainer]:
    """The unit as it is started; when this command ends, the model is loaded."""
    container.run("systemctl", "start", SERVICE)
    yield container
    container.run("systemctl", "stop", SERVICE)
    container.run("systemctl", "reset-failed", check=False)


def main_pid(container: SystemdContainer) -> str:
    return container.show(SERVICE, "MainPID")["MainPID"]


def ask(container: SystemdContainer, *options: str) -> str:
    """Returns the status of a request for an answer of two tokens."""
    return container.run(
        *("curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}"),
        *("--header", "Content-Type: application/json", *options),
        *("--data", '{"prompt": "The heart", "max_tokens": 2}'),
        "http://127.0.0.1:8000/v1/completions",
        check=False,
    )


def answers(container: SystemdContainer) -> bool:
    return ask(container, "--header", f"Authorization: Bearer {KEY}") == "200"


def test_unit__serves_when_it_is_started_and_ends_well(container: SystemdContainer) -> None:
    container.run("systemctl", "start", SERVICE)
    state = container.show(SERVICE, "ActiveState", "StatusText")
    assert state == {"ActiveState": "active", "StatusText": "serving"}
    assert answers(container), "started, and not ready"
    assert ask(container) == "401"
    container.run("systemctl", "stop", SERVICE)
    ended = container.show(SERVICE, "ActiveState", "Result", "ExecMainStatus")
    assert ended == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}


def test_unit__runs_without_rights_on_a_read_only_system(started: SystemdContainer) -> None:
    pid = main_pid(started)
    lines = started.run("cat", f"/proc/{pid}/status").splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert "0" not in status["Uid"].split()
    rows = map(str.split, started.run("cat", f"/proc/{pid}/mountinfo").splitlines())
    mounts = {fields[4]: fields[5].split(",") for fields in rows}
    assert {"ro", "nosuid"} <= {*mounts["/"]}
    assert "ro" in mounts["/root"]
    assert "/root" in mounts
    own = ("/proc", "/dev", "/run")
    writable = {at for at, options in mounts.items() if "rw" in options and not at.startswith(own)}
    allowed = {"/tmp", "/var/tmp", "/var/cache/private/moecast", "/var/lib/private/moecast"}
    assert writable == allowed


def test_unit__fits_its_memory_limit(started: SystemdContainer) -> None:
    """The model is tiny: all that the process takes is what the limit allows in addition to one."""
    assert answers(started)
    peak = re.search(r"VmHWM:\s+(\d+) kB", started.run("cat", f"/proc/{main_pid(started)}/status"))
    assert peak is not None
    assert int(peak[1]) << 10 < OTHERS_BYTES


def test_unit__is_restarted_when_it_is_killed(started: SystemdContainer) -> None:
    before = main_pid(started)
    started.run("kill", f"-{signal.SIGKILL.value}", before)
    wait_for(lambda: answers(started), "another process answers")
    assert main_pid(started) not in ("0", before)
    assert started.show(SERVICE, "NRestarts") == {"NRestarts": "1"}


def test_unit__is_restarted_when_it_hangs(container: SystemdContainer) -> None:
    """A stopped process sends no sign of life."""
    drop_in = "/etc/systemd/system/moecast.service.d/short.conf"
    container.write(drop_in, "[Service]\nWatchdogSec=3\nTimeoutAbortSec=2\nRestartSec=0\n")
    container.run("systemctl", "daemon-reload")
    container.run("systemctl", "start", SERVICE)
    before = main_pid(container)
    container.run("kill", f"-{signal.SIGSTOP.value}", before)
    wait_for(lambda: main_pid(container) not in ("0", before), "systemd starts another one")
    wait_for(lambda: answers(container), "it answers")
    container.run("systemctl", "stop", SERVICE)
    container.run("rm", drop_in)
    container.run("systemctl", "daemon-reload")


def test_unit__that_cannot_serve_fails_at_once_and_for_good(container: SystemdContainer) -> None:
    """Exit code 2: there is no such model, and starting again would not help."""
    lost = UNIT.read_text().replace("/srv/models/moe", "/srv/models/no-such-model")
    container.write("/etc/systemd/system/lost.service", lost)
    container.run("systemctl", "daemon-reload")
    container.run("systemctl", "start", "lost", check=False)
    shown = container.show("lost", "ActiveState", "ExecMainStatus", "NRestarts")
    assert shown == {"ActiveState": "failed", "ExecMainStatus": "2", "NRestarts": "0"}
    assert "no-such-model" in container.run("journalctl", "--no-pager", "--unit=lost")
