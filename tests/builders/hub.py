"""A stand-in for the Hub on the loopback: what its client asks when it reads and commits files."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

from tests.builders.loopback import QuietHandler, serve_loopback


class FakeHub:
    """One repository after another, each a list of commits; a commit is all of its files."""

    def __init__(self) -> None:
        self.commits: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.lock = threading.Lock()
        self.between: list[dict[str, bytes]] = []
        """Files that another user commits just before the next commit."""

    def create(self, repo: str) -> None:
        with self.lock:
            if repo not in self.commits:
                self.commits[repo] = []
                self._commit(repo, {".gitattributes": b"*.onnx filter=lfs\n"})

    def _commit(self, repo: str, files: dict[str, bytes]) -> str:
        number = len(self.commits[repo])
        oid = hashlib.sha1(f"{repo} {number}".encode()).hexdigest()
        self.commits[repo].append((oid, dict(files)))
        return oid

    def head(self, repo: str) -> tuple[str, dict[str, bytes]]:
        return self.commits[repo][-1]

    def commit(self, repo: str, lines: list[dict]) -> str | None:
        """The new commit, or None when the parent is not the head any more."""
        with self.lock:
            if self.between:
                self._commit(repo, {**self.head(repo)[1], **self.between.pop()})
            oid, files = self.head(repo)
            parent = lines[0]["value"].get("parentCommit")
            if parent is not None and parent != oid:
                return None
            files = dict(files)
            for line in lines[1:]:
                path = line["value"]["path"]
                if line["key"] == "file":
                    files[path] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del files[path]
            return self._commit(repo, files)


class Handler(QuietHandler):
    """Routes as the Hub has them; `server.hub` holds the repositories."""

    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> FakeHub:
        return self.server.hub  # type: ignore[attr-defined]

    def answer(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def answer_json(self, value: object, status: int = 200, **headers: str) -> None:
        self.answer(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def missing(self, code: str) -> None:
        self.answer_json({"error": code}, 404, X_Error_Code=code)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        parts = [unquote(one) for one in urlsplit(self.path).path.strip("/").split("/")]
        if parts[0] == "api":
            self.about("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self.file("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self.missing("RepoNotFound")

    do_HEAD = do_GET

    def about(self, repo: str, rest: list[str]) -> None:
        if repo not in self.hub.commits:
            self.missing("RepoNotFound")
            return
        oid, files = self.hub.head(repo)
        if rest[:1] == ["tree"]:
            known = {"type": "file", "oid": "0" * 40}
            sizes = {path: len(data) for path, data in files.items()}
            self.answer_json([{**known, "path": path, "size": sizes[path]} for path in sizes])
        else:
            self.answer_json({"id": repo, "sha": oid, "siblings": []})

    def file(self, repo: str, path: str) -> None:
        files = self.hub.head(repo)[1] if repo in self.hub.commits else None
        if files is None or path not in files:
            self.missing("RepoNotFound" if files is None else "EntryNotFound")
            return
        etag = hashlib.sha256(files[path]).hexdigest()
        self.answer(200, files[path], ETag=f'"{etag}"', X_Repo_Commit=self.hub.head(repo)[0])

    def do_POST(self) -> None:
        path, data = urlsplit(self.path).path, self.body()
        repo = "/".join(path.strip("/").split("/")[2:4])
        if path == "/api/repos/create":
            asked = json.loads(data)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            self.hub.create(name)
            self.answer_json({"url": f"http://{self.headers['Host']}/{name}"})
        elif path == "/api/validate-yaml":
            self.answer_json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            known = {"uploadMode": "regular", "shouldIgnore": False}
            files = json.loads(data)["files"]
            self.answer_json({"files": [{"path": one["path"], **known} for one in files]})
        elif "/commit/" in path:
            oid = self.hub.commit(repo, [json.loads(line) for line in data.splitlines()])
            if oid is None:
                self.answer_json({"error": "The parent commit is not the head"}, 412)
            else:
                url = f"http://{self.headers['Host']}/{repo}/commit/{oid}"
                self.answer_json({"commitUrl": url, "commitOid": oid})
        else:
            self.missing("RepoNotFound")


@contextmanager
def fake_hub() -> Iterator[tuple[str, FakeHub]]:
    """Its address, and what it holds."""
    hub = FakeHub()
    with serve_loopback(Handler, hub=hub) as address:
        yield address, hub
