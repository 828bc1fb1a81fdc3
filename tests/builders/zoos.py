"""A zoo behind a web server, and the zoo's commands as a user types them."""

from configs.program import run_program
from tests.builders.web import Site
from zoo.catalog import Zoo
from zoo.index import EntryReference, blob_path
from zoo.pull import pull_reference
from zoo.storage.folder import FolderStorage
from zoo.storage.remote import HttpStorage

Far = tuple[str, Site]
"""Address and controls of a zoo's server."""


def zoo(*arguments: object) -> int:
    """Runs `moecast zoo ...` and returns the exit code."""
    return run_program("zoo", [str(one) for one in arguments])


def files_of(site: Site) -> dict[str, int]:
    """Paths of everything that a pull of its entry downloads, with their sizes."""
    manifest = Zoo(FolderStorage(site.folder)).open(EntryReference("tiny/stride")).manifest
    found = {blob_path(one.sha256): one.size for one in manifest.files.values()}
    return {**found, blob_path(manifest.digest): len(manifest.to_bytes())}


def pull_tiny(address: str) -> None:
    """Pulls its entry."""
    pull_reference(Zoo(HttpStorage(address)), EntryReference("tiny/stride"))
