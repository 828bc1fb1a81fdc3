"""No network, no user's folders, no telemetry: what every test can rely on."""

import faulthandler
import gc
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from runtime.engine import memory
from tests.builders.cheap_loads import cheap

# Before any library reads them.
os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1",
    TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline", WANDB_SILENT="true", MLFLOW_DISABLE_TELEMETRY="true",
)  # fmt: skip
# One thread: the order of additions, and with it the last bits, stay the same.
os.environ.setdefault("OMP_NUM_THREADS", "1")
faulthandler.enable()
# A shell starts what runs in its background with interrupts ignored, and children inherit that.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes is the machine's affair.
settings.register_profile("moecast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("moecast")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Require that a test that hangs is ended, and shows the stacks of all threads.

    pytest-timeout does so by its thread method only, and not for tests that are given no limit.
    """
    assert config.getini("timeout_method") == "thread", "pyproject.toml: timeout_method"
    assert float(config.getini("timeout")) > 0, "pyproject.toml: timeout"
    for item in items:
        for mark in item.iter_markers("timeout"):
            limit = mark.kwargs.get("timeout", mark.args[0] if mark.args else None)
            method = mark.kwargs.get("method", mark.args[1] if len(mark.args) > 1 else "thread")
            assert limit, f"{item.nodeid}: a test without a limit may hang"
            assert method == "thread", f"{item.nodeid}: timeout method {method} shows one stack"


@pytest.fixture(autouse=True)
def own_zoo(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for pulled entries, so that no test sees or changes the user's."""
    folder = tmp_path_factory.mktemp("zoo")
    monkeypatch.setenv("MOECAST_CACHE", str(folder))
    monkeypatch.delenv("MOECAST_ZOO", raising=False)
    return folder


@pytest.fixture(scope="session")
def leave_out_libraries() -> Iterator[Callable[[], None]]:
    """Spares each load of a tiny model what takes four times as long as the load itself.

    Child processes do as users' do.
    """
    with cheap() as leave_out:
        yield leave_out


@pytest.fixture(autouse=True)
def cheap_loads(leave_out_libraries: Callable[[], None]) -> None:
    """Collections in a test leave out what earlier ones have imported."""
    leave_out_libraries()


@pytest.fixture
def real_collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Garbage collection as a load and the close of a model set it."""
    monkeypatch.setattr(memory, "gc", gc)
    yield
    gc.freeze()


@pytest.fixture(autouse=True)
def no_settings_for_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes after a test what the commands that it ran have set for their child processes."""
    for name in ("PYTHONSAFEPATH", "OMP_WAIT_POLICY"):
        before = os.environ.get(name)
        monkeypatch.setenv(name, before or "")  # set, so that its absence is restored, too
        if before is None:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def same_kernels() -> Iterator[None]:
    """Restores what commands set for their process, which changes the last bits of later tests."""
    torch = sys.modules.get("torch")
    threads = int(os.environ["OMP_NUM_THREADS"]) if torch is None else torch.get_num_threads()
    onednn = True if torch is None else torch.backends.mkldnn.enabled
    yield
    if (torch := sys.modules.get("torch")) is None:
        return
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if torch.backends.mkldnn.enabled != onednn:
        torch.backends.mkldnn.enabled = onednn


@pytest.fixture(autouse=True)
def same_gradients() -> Iterator[None]:
    """Fails a test that leaves gradients off, which later ones of the process would train with."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        is_left = torch.is_inference_mode_enabled() or not torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        assert not is_left


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """Restores the log's handlers and level: a command's would write to a stream that is closed."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture(scope="session", autouse=True)
def ray_folder() -> Iterator[None]:
    """Ray, where a test starts one, keeps its session and its logs in a folder that is removed."""
    # Short: it begins the paths of Ray's sockets, which may have 107 bytes.
    folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
    with folder, pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", folder.name)
        yield
