"""Loads of tiny models that take no longer than the models need."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from runtime.engine import memory


@contextmanager
def cheap() -> Iterator[None]:
    """Garbage collection leaves out the libraries, and the pages of their code stay in memory."""
    kept = SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None)
    gc.freeze()
    with patch.object(memory, "gc", kept), patch.object(memory, "find_library_code", lambda _: ()):
        yield
