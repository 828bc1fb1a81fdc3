"""Requests and bytes of a pull from a zoo on a web server, and of very many of them."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

from benchmarks.loopback import serve_loopback
from benchmarks.process import python_module, run_program

INDEX = "index.json"


class CountingHandler(SimpleHTTPRequestHandler):
    """Serves a folder and counts the answers."""

    def log_message(self, *_: Any) -> None:
        """Writes nothing: only the counts are of interest."""

    def copyfile(self, source: Any, outputfile: Any) -> None:
        body = source.read()
        self.server.sent.append((self.path.lstrip("/"), len(body)))  # type: ignore[attr-defined]
        outputfile.write(body)


@contextmanager
def count_answers(folder: Path) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Serves a folder on the loopback; yields the address and path and bytes of each answer."""
    handler = partial(CountingHandler, directory=str(folder))
    sent: list[tuple[str, int]] = []
    with serve_loopback(handler, sent=sent) as address:
        yield address, sent


@dataclass(frozen=True, kw_only=True)
class PullCost:
    """Answers of a zoo to one `zoo pull`; bytes are those of bodies."""

    what: str
    """An entry, or a model: all entries that the system moecast takes."""
    requests: int
    num_bytes: int
    index_bytes: int
    """The part of them that is the index, which is read anew by every pull."""
    blobs: int
    """Different files besides the index; a manifest is requested twice, to read and to keep it."""
    blob_bytes: int
    again_requests: int
    """Requests of a second pull, when nothing has changed."""
    again_bytes: int


def measure_pull(what: str, zoo: Path, options: Sequence[str] = ()) -> PullCost:
    """Pulls twice, with the command and an empty cache, from a server on the loopback."""
    with count_answers(zoo) as (address, sent), tempfile.TemporaryDirectory() as cache:
        command = [*python_module("moecast"), "zoo", "pull", what, f"zoo={address}", *options]
        environment = {"MOECAST_CACHE": cache}
        run_program([*command, f"run_dir={cache}/first"], environment=environment)
        first = list(sent)
        run_program([*command, f"run_dir={cache}/second"], environment=environment)
        again = sent[len(first) :]
    blobs = {path: size for path, size in first if path != INDEX}
    return PullCost(
        what=what,
        requests=len(first),
        num_bytes=sum(size for _, size in first),
        index_bytes=sum(size for path, size in first if path == INDEX),
        blobs=len(blobs),
        blob_bytes=sum(blobs.values()),
        again_requests=len(again),
        again_bytes=sum(size for _, size in again),
    )


@dataclass(frozen=True, kw_only=True)
class Egress:
    """The origin's part while all machines pull once."""

    layout: str
    origin_requests: int
    origin_bytes: int
    seconds: float
    """Time at the assumed speed of the origin's uplink."""


def plan_egress(
    cost: PullCost,
    *,
    machines: int,
    edges: int,
    sites: int,
    uplink_bytes_per_second: float,
) -> list[Egress]:
    """Returns the origin's part in three layouts.

    Args:
        cost: One pull.
        machines: Machines that pull once.
        edges: Caches of a CDN that each fetch a blob once. The index is never served from a cache:
            it changes, and clients refuse an old one.
        sites: Places with a mirror (`zoo pull all=true`, or a shared MOECAST_CACHE) that pulls
            once; the machines there read the mirror.
        uplink_bytes_per_second: Speed of the origin.
    """
    layouts = {
        "one server": (machines * cost.requests, machines * cost.num_bytes),
        f"a CDN of {edges} caches": (
            machines + edges * cost.blobs,
            machines * cost.index_bytes + edges * cost.blob_bytes,
        ),
        f"{sites} sites with a mirror": (sites * cost.requests, sites * cost.num_bytes),
    }
    return [
        Egress(
            layout=layout,
            origin_requests=requests,
            origin_bytes=num_bytes,
            seconds=num_bytes / uplink_bytes_per_second,
        )
        for layout, (requests, num_bytes) in layouts.items()
    ]
