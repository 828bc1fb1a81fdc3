"""An S3 bucket in memory, to which requests of several publishers come in an order of choice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, repeat
from typing import Any

from greenlet import getcurrent, greenlet

from zoo.digest import hash_bytes
from zoo.index import INDEX
from zoo.storage.remote import ObjectStorage


class Refused(OSError):
    """An error as botocore's: the store's code is in its response."""

    def __init__(self, code: str) -> None:
        super().__init__(f"An error occurred ({code})")
        self.response = {"Error": {"Code": code}}


@dataclass
class Bucket:
    """What `ObjectStorage` uses of fsspec's file systems, with the conditional writes of S3.

    Each request for the index gives way to the other publishers first.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    minds_conditions: bool = True
    refusal: str = "PreconditionFailed"
    loses_answer: Callable[[], bool] = bool
    """Whether the answer to a write is lost, so that the client repeats the request."""
    refuses: dict[str, str] = field(default_factory=dict)
    """Code of the error by the method that raises it."""

    def _serve(self, method: str, name: str) -> None:
        if name.endswith(f"/{INDEX}") and (scheduler := getcurrent().parent) is not None:
            scheduler.switch()
        if method in self.refuses:
            raise Refused(self.refuses[method])

    def _etag(self, name: str) -> str | None:
        return f'"{hash_bytes(self.objects[name])}"' if name in self.objects else None

    def info(self, name: str) -> dict[str, Any]:
        self._serve("info", name)
        if name not in self.objects:
            raise FileNotFoundError(name)
        return {"ETag": self._etag(name), "size": len(self.objects[name]), "type": "file"}

    def cat_file(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        self._serve("cat_file", name)
        if name not in self.objects:
            raise FileNotFoundError(name)
        return self.objects[name][start:end]

    def exists(self, name: str) -> bool:
        self._serve("exists", name)
        return any(one == name or one.startswith(f"{name}/") for one in self.objects)

    def ls(self, name: str, *, detail: bool = True) -> list[str]:
        self._serve("ls", name)
        return [one for one in self.objects if one.rpartition("/")[0] == name]

    def rm_file(self, name: str) -> None:
        self._serve("rm_file", name)
        del self.objects[name]

    def pipe_file(self, name: str, data: bytes, IfMatch=None, IfNoneMatch=None) -> None:
        for _ in range(2):
            self._serve("pipe_file", name)
            etag = self._etag(name)
            differs = IfMatch not in (None, etag) or (IfNoneMatch and etag is not None)
            if self.minds_conditions and differs:
                raise Refused("NoSuchKey" if IfMatch and etag is None else self.refusal)
            self.objects[name] = data
            if not self.loses_answer():
                break

    def makedirs(self, _name: str, *, exist_ok: bool) -> None: ...

    def _parent(self, name: str) -> str:
        return name.rpartition("/")[0]


class BucketStorage(ObjectStorage):
    """One publisher's view of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__("s3://bucket/zoo")
        object.__setattr__(self, "bucket", bucket)

    @cached_property
    def _files(self) -> tuple[Bucket, str]:  # type: ignore[override]
        return self.bucket, "bucket/zoo"


def run_in_turns(jobs: Sequence[Callable[[], object]], turns: Sequence[int]) -> None:
    """Runs the jobs at once; a turn is the number of the one that makes the next request."""
    running = [greenlet(job) for job in jobs]
    for turn in chain(turns, repeat(0)):
        if not (left := [one for one in running if not one.dead]):
            return
        left[turn % len(left)].switch()
