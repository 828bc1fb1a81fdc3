"""A lower limit of open files."""

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limit_open_files(most: int) -> Iterator[None]:
    """This process, and those that it starts in the block, open no file with a higher number."""
    gc.collect()  # files of models that nobody refers to go
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
