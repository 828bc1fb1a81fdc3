"""Joining Ray: processes that imported or joined it before."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from runtime.serving.ray_cluster import ClusterError, join


class FakeRay(ModuleType):
    """The module, imported and perhaps initialized."""

    def __init__(self, *, initialized: bool):
        super().__init__("ray")
        self.__spec__ = ModuleSpec("ray", None)
        self.initialized = initialized

    def is_initialized(self) -> bool:
        return self.initialized


def test_join__rejects_a_ray_imported_without_a_token(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", FakeRay(initialized=False))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ClusterError, match="already imported without a token"):
        join(None, num_cpus=1, option="ray_address")


def test_join__leaves_an_initialized_ray_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", FakeRay(initialized=True))
    assert not join(None, num_cpus=1, option="ray_address")
