"""An entry: a folder with a manifest, and the reading of its files through their digests."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from predictors.base import Signal
from predictors.files import new_folder, write_atomic
from predictors.spec import ModelSpec
from predictors.versions import package_version
from zoo.card import write_card
from zoo.digest import HEX64, check, digest_of, read_inside
from zoo.errors import DamagedError, ZooError
from zoo.graph import check_declared, check_graph
from zoo.manifest import (
    FORMAT_VERSION,
    MAX_MANIFEST_BYTES,
    NAME,
    Manifest,
    ModelRecord,
    Scalar,
    parse_manifest,
    records,
)

MANIFEST, MANIFEST_DIGEST = "manifest.json", "manifest.sha256"
CARD, METRICS = "README.md", "metrics.json"
SIGNATURE = "signature.json"
MAX_SIGNATURE_BYTES = 1 << 20

Fetch = Callable[[str, int], bytes]
"""(path, limit) to at most limit + 1 raw bytes; FileNotFoundError if there is no such file."""


@dataclass(frozen=True)
class Entry:
    """An entry whose manifest was checked; its files are checked as they are read."""

    manifest: Manifest
    where: str
    """Folder or zoo that it was found in, for messages."""
    fetch: Fetch
    signature: Callable[[], bytes | None] = lambda: None
    """Bytes of the signature that came with it, unchecked; None where it is not signed."""

    def read(self, path: str) -> bytes:
        """One file's bytes, after size and sha256 were found right (DamagedError otherwise).

        An ONNX graph has also been found to be one self-contained file with the inputs and outputs
        that the manifest declares (ZooError otherwise).
        """
        record = self.manifest.files.get(path)
        what = f"{path} of {self.manifest.name} in {self.where}"
        if record is None:
            raise ZooError(f"{what} is not in its manifest")
        try:
            raw = self.fetch(path, record.size)
        except FileNotFoundError as error:
            raise DamagedError(f"{what} is missing; get the entry again") from error
        data = check(raw, sha256=record.sha256, size=record.size, what=what)
        if path.endswith(".onnx"):
            check_declared(check_graph(data, what=what), record.graph, what=what)
        return data

    def payload(self) -> dict[str, bytes]:
        """What the predictor is made of: every file but the card and the metrics."""
        return {
            path: self.read(path) for path in self.manifest.files if path not in (CARD, METRICS)
        }

    def metrics(self) -> dict[str, Any]:
        """The whole of `metrics.json`; empty when the entry has none."""
        return json.loads(self.read(METRICS)) if METRICS in self.manifest.files else {}

    def verify(self) -> None:
        """Reads everything; raises at the first file that is not as promised."""
        for path in self.manifest.files:
            self.read(path)


def write_entry(
    folder: Path,
    *,
    name: str,
    kind: str,
    options: Mapping[str, Any],
    spec: ModelSpec,
    signals: Collection[Signal],
    files: Mapping[str, bytes],
    metrics: Mapping[str, Any],
    trace_digest: str | None,
    parity: Mapping[str, Scalar],
    licence: str = "Apache-2.0",
    card_extra: str = "",
    created: str | None = None,
) -> Manifest:
    """Makes the folder in one step: complete, or as it was before.

    `files` is the predictor's payload; `metrics` is written whole to metrics.json, and its
    "held_out" table (name to number, None for not measured) goes into manifest and card.
    An entry that stands at `folder` is replaced; any other folder there is refused.
    """
    if not NAME.fullmatch(name):
        raise ZooError(f"the name {name!r} is not MODEL/PREDICTOR in lower case letters and digits")
    if folder.exists() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
        raise ZooError(f"{folder} exists and is not an entry; name another folder")
    draft = Manifest(
        format_version=FORMAT_VERSION,
        name=name,
        kind=kind,
        options=dict(options),
        model=ModelRecord(**spec.as_dict()),
        signals=sorted(signals),
        licence=licence,
        trace_digest=trace_digest,
        metrics=dict(metrics.get("held_out", {})),
        parity=dict(parity),
        code_version=package_version("moecast") or "not installed",
        created=created or datetime.now(UTC).isoformat(timespec="seconds"),
        files={},
    )
    everything = {
        **files,
        METRICS: (json.dumps(metrics, indent=2, allow_nan=False) + "\n").encode(),
        CARD: write_card(draft, extra=card_extra),
    }
    graphs = {
        path: check_graph(data, what=path) for path, data in files.items() if path.endswith(".onnx")
    }
    # Built again, not copied, so that the checks on paths, suffixes and sizes run.
    manifest = Manifest(**{**dict(draft), "files": records(everything, graphs)})
    write_folder(folder, manifest, everything)
    return manifest


def write_folder(
    folder: Path, manifest: Manifest, files: Mapping[str, bytes], signature: bytes | None = None
) -> None:
    """An entry as a folder, in one step: complete, or as it was before."""
    data = manifest.to_bytes()
    with new_folder(folder) as temporary:
        for path, content in files.items():
            write_atomic(temporary / path, content)
        if signature is not None:
            write_atomic(temporary / SIGNATURE, signature)
        write_atomic(temporary / MANIFEST_DIGEST, f"{digest_of(data)}  {MANIFEST}\n".encode())
        write_atomic(temporary / MANIFEST, data)


def open_entry(folder: Path | str) -> Entry:
    """The entry in a folder. Its manifest is parsed only after `manifest.sha256` agrees with it.

    Raises ZooError when there is no entry, DamagedError when the manifest is torn or altered.
    """
    folder = Path(folder)
    try:
        line = read_inside(folder, MANIFEST_DIGEST, limit=256)
        data = read_inside(folder, MANIFEST, limit=MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ZooError(
            f"{folder} is not a zoo entry: it has no {MANIFEST} with {MANIFEST_DIGEST}. "
            "`python -m train` writes entries; `python -m zoo list` shows those in the zoo."
        ) from error
    promised, _, rest = line.decode("utf-8", errors="replace").partition(" ")
    if not HEX64.fullmatch(promised) or rest != f" {MANIFEST}\n":
        raise DamagedError(f"{folder / MANIFEST_DIGEST} is damaged; get the entry again")
    check(data, sha256=promised, size=None, what=str(folder / MANIFEST))
    manifest = parse_manifest(data, what=str(folder / MANIFEST))

    def signature() -> bytes | None:
        if not (folder / SIGNATURE).exists():
            return None
        return read_inside(folder, SIGNATURE, limit=MAX_SIGNATURE_BYTES)

    def fetch(path: str, limit: int) -> bytes:
        return read_inside(folder, path, limit=limit)

    return Entry(manifest, str(folder), fetch, signature)


def strangers(folder: Path, manifest: Manifest) -> list[str]:
    """Files in the folder that the manifest does not name."""
    found = {str(one.relative_to(folder)) for one in folder.rglob("*") if not one.is_dir()}
    return sorted(found - {*manifest.files, MANIFEST, MANIFEST_DIGEST, SIGNATURE})
