"""Pulls that are killed, and unwanted use of the network."""

import os
import sys

import pytest

from tests.builders.entries import mlp_entry
from tests.builders.faults.killed_pulls import kill_pulls
from tests.builders.forked import call_in_forks
from tests.builders.processes import run
from tests.builders.web import served
from tests.builders.zoos import publish
from tests.faults.conftest import skip
from zoo.catalog import WritableZoo
from zoo.entry import open_entry
from zoo.storage.folder import FolderStorage

pytestmark = pytest.mark.faults


@pytest.mark.usefixtures("strace")
def test_pull__killed_at_every_call_leaves_nothing_half_and_goes_on(tmp_path):
    """SIGKILL at each write, rename and close until one pull comes through."""
    publish(tmp_path / "far")
    (tmp_path / "caches").mkdir()
    with served(tmp_path / "far") as (address, _):
        (runs,) = call_in_forks(kill_pulls, [address], [tmp_path / "caches"])
    if reason := runs[0].get("skip"):
        skip(f"strace cannot attach: {reason}")
    assert [one for one in runs if one["wrong"] or one["again"] != 0] == []
    assert [one["killed"] for one in runs] == [True] * (len(runs) - 1) + [False]
    assert len(runs) > 15


LOADS = """
from zoo.load import load_predictor
from zoo.errors import ZooError
assert load_predictor("tiny/mlp", spec=None).kind == "mlp"
try:
    load_predictor("tiny/none", spec=None)
except ZooError as error:
    assert "moecast zoo pull NAME zoo=ADDRESS" in str(error), error
else:
    raise AssertionError
"""


@pytest.mark.usefixtures("strace")
def test_load__of_a_cached_entry_opens_no_connection(tmp_path):
    mlp_entry(tmp_path / "e")
    WritableZoo(FolderStorage(tmp_path / "cache/zoo")).add(open_entry(tmp_path / "e"))
    log = tmp_path / "connects"
    strace = ("strace", "-f", "-qq", "-e", "trace=connect,sendto", "-o", log)
    environment = {**os.environ, "MOECAST_CACHE": str(tmp_path / "cache")}
    run(*strace, sys.executable, "-c", LOADS, environment=environment)
    assert [line for line in log.read_text().splitlines() if "AF_INET" in line] == []
