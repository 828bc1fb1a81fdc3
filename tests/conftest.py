"""No network, no user's folders, no telemetry: what every test can rely on."""

import faulthandler
import os
from pathlib import Path

import pytest

# Before any library reads them.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
)
# One thread: the order of additions, and with it the last bits, stay the same.
os.environ.setdefault("OMP_NUM_THREADS", "1")
faulthandler.enable()


@pytest.fixture(autouse=True)
def own_zoo(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for pulled entries, so that no test sees or changes the user's."""
    folder = tmp_path_factory.mktemp("zoo")
    monkeypatch.setenv("MOECAST_ZOO", str(folder))
    return folder
