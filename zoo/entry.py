"""An entry: a folder with a manifest, whose files are read through their digests."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from predictors.base import Predictor
from predictors.errors import PredictorError
from predictors.files import replace_folder, write_atomic
from predictors.origin import package_version
from predictors.records import ModelRecord
from zoo.card import FIGURE, CardFigure, write_card
from zoo.digest import HEX64, check_digest, hash_bytes, read_checked, read_inside
from zoo.errors import DamagedError, ZooError
from zoo.manifest import (
    FORMAT_VERSION,
    MAX_MANIFEST_BYTES,
    MAX_NAME,
    NAME,
    EntryManifest,
    FileRecord,
    GraphRecord,
    Scalar,
    parse_manifest,
)

MANIFEST, MANIFEST_DIGEST = "manifest.json", "manifest.sha256"
CARD, METRICS, TRAINING = "README.md", "metrics.json", "training.json"
DESCRIPTION = (CARD, METRICS, TRAINING, FIGURE)
"""Files that describe the predictor; the others are its payload."""
SIGNATURE = "signature.json"
MAX_SIGNATURE_BYTES = 1 << 20
FetchFile = Callable[[str, int], bytes]
"""(path, limit) to at most limit + 1 raw bytes; FileNotFoundError if there is no such file."""


@dataclass(frozen=True)
class ZooEntry:
    """An entry whose manifest was checked; its files are checked as they are read."""

    manifest: EntryManifest
    where: str
    """The folder or zoo that contains it, for messages."""
    fetch: FetchFile
    read_signature: Callable[[], bytes | None] = lambda: None
    """Returns the signature's bytes, unchecked; None if the entry is not signed."""
    folder: Path | None = None
    """The entry's own folder; None if it is in a zoo."""

    def read(self, path: str) -> bytes:
        """Reads a file and checks it before anything parses it.

        Raises:
            DamagedError: it is missing, or its size or sha256 differs from the manifest.
            ZooError: it is not in the manifest, or is an ONNX graph that no training writes, or has
                other inputs and outputs than the manifest declares.
        """
        record = self.manifest.files.get(path)
        what = f"{path} of {self.manifest.name} in {self.where}"
        if record is None:
            raise ZooError(f"{what} is not in its manifest")
        fetch = partial(self.fetch, path, record.size)
        data = read_checked(fetch, sha256=record.sha256, size=record.size, what=what)
        if path.endswith(".onnx"):
            actual, declared = check_graph(data, what=what), record.graph
            if declared is not None and actual != declared:
                raise ZooError(
                    f"{what} maps {actual.inputs} to {actual.outputs}; its manifest declares "
                    f"{declared.inputs} to {declared.outputs}"
                )
        return data

    def payload(self) -> dict[str, bytes]:
        """Reads the predictor's files: all but those that describe it."""
        return {path: self.read(path) for path in self.manifest.files if path not in DESCRIPTION}

    def metrics(self) -> dict[str, Any]:
        """Reads `metrics.json`; raises as `read`, and ZooError if it is not a table."""
        return self._read_table(METRICS)

    def training(self) -> dict[str, Any] | None:
        """Reads `training.json`; None if the entry has none. Raises as `metrics`."""
        return self._read_table(TRAINING) or None

    def _read_table(self, path: str) -> dict[str, Any]:
        """Reads a table of JSON; empty if the entry has none."""
        if path not in self.manifest.files:
            return {}
        data = self.read(path)
        try:
            table = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ZooError(f"{path} of {self.manifest.name} is not JSON ({error})") from error
        if not isinstance(table, dict):
            raise ZooError(f"{path} of {self.manifest.name} is not a table of JSON")
        return table

    def verify(self) -> None:
        """Reads every file.

        Raises as `read` at the first that differs from the manifest, and DamagedError if the
        entry's folder has files that the manifest does not list.
        """
        for path in self.manifest.files:
            self.read(path)
        self.require_listed_files()

    def require_listed_files(self) -> None:
        """Raises DamagedError if the entry's folder has files that the manifest does not list."""
        if self.folder is None:
            return
        paths = (path for path in self.folder.rglob("*") if not path.is_dir())
        known = {*self.manifest.files, MANIFEST, MANIFEST_DIGEST, SIGNATURE}
        if others := sorted({str(path.relative_to(self.folder)) for path in paths} - known):
            raise DamagedError(f"{self.folder} has files that its manifest does not list: {others}")


def write_entry(
    folder: Path,
    predictor: Predictor,
    *,
    name: str,
    metrics: Mapping[str, Any] = MappingProxyType({}),
    trace_digest: str | None = None,
    parity: Mapping[str, Scalar] = MappingProxyType({}),
    licence: str = "Apache-2.0",
    card_extra: str = "",
    created: str | None = None,
    training: Mapping[str, Any] | None = None,
    figure: CardFigure | None = None,
) -> EntryManifest:
    """Writes a predictor's entry in one step, so that it is complete or as it was before.

    `trace_digest` is that of the trace that it was trained on, if any. `metrics` is written to
    metrics.json; its "held_out" table (name to number, None if not measured) is also in manifest
    and card. `training` is written to training.json, so that it can be repeated. An entry at
    `folder` is replaced; any other folder there is refused.
    """
    if not NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise ZooError(
            f"the name {name!r} is not MODEL/PREDICTOR in lower case letters and digits, "
            f"{MAX_NAME} characters at most"
        )
    if folder.exists() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
        raise ZooError(f"{folder} exists and is not an entry; name another folder")
    draft = EntryManifest(
        format_version=FORMAT_VERSION,
        name=name,
        kind=predictor.kind,
        options=predictor.options(),
        model=ModelRecord.from_spec(predictor.spec),
        signals=sorted(predictor.signals),
        licence=licence,
        trace_digest=trace_digest,
        metrics=dict(metrics.get("held_out", {})),
        parity=dict(parity),
        code_version=package_version("moecast") or "not installed",
        created=created or datetime.now(UTC).isoformat(timespec="seconds"),
        files={},
    )
    all_files = {
        **predictor.files(),
        METRICS: (json.dumps(dict(metrics), indent=2, allow_nan=False) + "\n").encode(),
        CARD: write_card(draft, extra=card_extra, training=training, figure=figure),
    }
    if training is not None:
        all_files[TRAINING] = (json.dumps(training, indent=2) + "\n").encode()
    if figure is not None:
        all_files[FIGURE] = figure.png
    records = {
        path: FileRecord(
            sha256=hash_bytes(data),
            size=len(data),
            graph=check_graph(data, what=path) if path.endswith(".onnx") else None,
        )
        for path, data in sorted(all_files.items())
    }
    # Constructed again, not copied, so that the checks of paths, suffixes and sizes run.
    manifest = EntryManifest(**{**dict(draft), "files": records})
    write_folder(folder, manifest, all_files)
    return manifest


def write_folder(
    folder: Path,
    manifest: EntryManifest,
    files: Mapping[str, bytes],
    signature: bytes | None = None,
) -> None:
    """Writes an entry's files in one step, so that it is complete or as it was before."""
    data = manifest.to_bytes()
    with replace_folder(folder) as temporary:
        for path, content in files.items():
            write_atomic(temporary / path, content)
        if signature is not None:
            write_atomic(temporary / SIGNATURE, signature)
        write_atomic(temporary / MANIFEST_DIGEST, f"{hash_bytes(data)}  {MANIFEST}\n".encode())
        write_atomic(temporary / MANIFEST, data)


def open_entry(folder: Path | str) -> ZooEntry:
    """Opens an entry's folder; the manifest is parsed after `manifest.sha256` agrees with it.

    Raises ZooError if there is no entry, DamagedError if its manifest is torn or altered.
    """
    folder = Path(folder)
    try:
        line = read_inside(folder, MANIFEST_DIGEST, limit=256)
        data = read_inside(folder, MANIFEST, limit=MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ZooError(
            f"{folder} is not a zoo entry: it has no {MANIFEST} with {MANIFEST_DIGEST}. "
            "`moecast train` writes entries; `moecast zoo list` shows those in the zoo."
        ) from error
    promised, _, rest = line.decode("utf-8", errors="replace").partition(" ")
    if not HEX64.fullmatch(promised) or rest != f" {MANIFEST}\n":
        raise DamagedError(f"{folder / MANIFEST_DIGEST} is damaged; pull the entry again")
    check_digest(data, sha256=promised, size=None, what=str(folder / MANIFEST))
    manifest = parse_manifest(data, what=str(folder / MANIFEST))

    def read_signature() -> bytes | None:
        exists = (folder / SIGNATURE).exists()
        return read_inside(folder, SIGNATURE, limit=MAX_SIGNATURE_BYTES) if exists else None

    return ZooEntry(manifest, str(folder), partial(read_inside, folder), read_signature, folder)


def check_graph(data: bytes, *, what: str) -> GraphRecord:
    """Returns the graph's inputs and outputs.

    Raises ZooError if it is none that `moecast train` writes, on any machine.
    """
    # Listing entries needs no code that computes networks.
    from predictors.networks.program import translate

    try:
        program = translate(data)
    except PredictorError as error:
        raise ZooError(f"{what}: {error}") from error
    return GraphRecord(inputs=program.input_shapes, outputs=program.output_shapes)
