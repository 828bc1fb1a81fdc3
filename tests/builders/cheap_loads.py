"""Loads of tiny models that take no longer than the models need."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from runtime.engine import memory


@contextmanager
def cheap() -> Iterator[Callable[[], None]]:
    """Garbage collection leaves out the libraries, and the pages of their code stay in memory.

    Yields a function that has collections leave out those imported since, too. What else is alive
    when it is called is never freed.
    """
    num_modules = 0

    def leave_out_libraries() -> None:
        nonlocal num_modules
        if num_modules != len(sys.modules):
            gc.collect()
            gc.freeze()
            num_modules = len(sys.modules)

    kept = SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None)
    leave_out_libraries()
    with patch.object(memory, "gc", kept), patch.object(memory, "find_library_code", lambda _: ()):
        yield leave_out_libraries
