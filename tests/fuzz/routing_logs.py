"""Published routing logs: JSON lines and CSV."""

import shutil

from collect.config import ImportConfig
from collect.importer import import_routing
from collect.traces import Trace
from tests.fuzz.named_file import write_input


def import_log(data: bytes, name: str) -> None:
    """Imports the log as a trace."""
    path = write_input(data, name)
    folder = path.parent / "trace"
    try:
        import_routing(path, folder, ImportConfig())
        # What was imported can be read.
        Trace.open(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
