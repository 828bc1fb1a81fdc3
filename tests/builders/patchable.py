"""A policy core whose methods a test may replace: those of compiled classes are read-only.

Instances of these subclasses have attributes of their own, which calls from within the compiled
core find as well.
"""

from typing import Any

import pytest

from runtime.policy import build
from runtime.policy.cache import ExpertCache
from runtime.policy.device_cache import DeviceCache
from runtime.policy.queue import TransferQueue
from runtime.policy.tier import CacheTier


class PatchableQueue(TransferQueue):
    pass


class PatchableTier(CacheTier):
    def __init__(self, cache: ExpertCache, *, chunk_bytes: Any, order: Any, **options: Any):
        super().__init__(cache, chunk_bytes=chunk_bytes, order=order, **options)
        self.queue = PatchableQueue(order, num_layers=len(chunk_bytes))


class PatchableDeviceCache(DeviceCache):
    pass


def use_patchable_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives such a core to what is built from now on."""
    monkeypatch.setattr(build, "CacheTier", PatchableTier)
    monkeypatch.setattr(build, "DeviceCache", PatchableDeviceCache)
