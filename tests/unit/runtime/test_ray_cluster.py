"""Which Ray is joined, and which is refused."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from runtime.ray_cluster import ClusterError, join


class Ray(ModuleType):
    """As it looks to whoever asks whether it runs."""

    def __init__(self, *, runs: bool):
        super().__init__("ray")
        self.__spec__ = ModuleSpec("ray", None)
        self.runs = runs

    def is_initialized(self) -> bool:
        return self.runs


def test_ray__that_was_imported_without_a_token_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", Ray(runs=False))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ClusterError, match="imported before this, without a token"):
        join(None, num_cpus=1, option="cluster")


def test_ray__that_runs_in_this_process_is_left_as_it_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", Ray(runs=True))
    assert not join(None, num_cpus=1, option="cluster")
