"""Keeps Transformers' progress bars to terminals: in a log file they are noise."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def progress_bars() -> Iterator[None]:
    """Within, bars are drawn only where standard error is a terminal; afterwards as before."""
    shown = logging.is_progress_bar_enabled()
    if shown and not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
