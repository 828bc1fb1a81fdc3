"""Files of a zoo: `manifest.json`, `index.json`, lock files, graphs."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from predictors.networks.network import Network
from predictors.registry import KINDS, LEARNED, load_from_files
from tests.builders.predictors import serve, small_spec
from tests.fuzz.named_file import write_input
from zoo.catalog import Zoo
from zoo.digest import hash_bytes
from zoo.entry import check_graph
from zoo.index import INDEX, EntryReference, blob_path, parse_reference, read_lockfile
from zoo.manifest import EntryManifest, parse_manifest
from zoo.storage.base import Storage

SPEC = small_spec(num_layers=4)
STATEFUL = {kind: cls.empty(SPEC).files() for kind, cls in KINDS.items() if kind not in LEARNED}
"""Files of predictors without observations, by kind."""


@dataclass(frozen=True)
class MemoryStorage(Storage):
    files: Mapping[str, bytes]
    address = "memory"

    @contextmanager
    def stream(self, path: str) -> Iterator[Iterator[bytes]]:
        if path not in self.files:
            raise FileNotFoundError(path)
        yield iter([self.files[path]])


def open_manifest(data: bytes) -> None:
    """Opens an entry by its manifest, as it is and in the canonical form of its values."""
    try:
        parsed = EntryManifest.model_validate_json(data)
    except ValidationError:
        parse_manifest(data, what="manifest")
        raise AssertionError("an invalid manifest was accepted") from None
    for form in (parsed.to_bytes(), data):
        storage = MemoryStorage({blob_path(hash_bytes(form)): form})
        entry = Zoo(storage).open_digest(hash_bytes(form), name=parsed.name)
        assert entry.manifest.spec.num_layers > 0
        assert entry.manifest.digest == hash_bytes(form)


def open_index(data: bytes) -> None:
    index = Zoo(MemoryStorage({INDEX: data})).read_index(required=True)
    index.to_bytes()
    for name, listing in index.entries.items():
        for version in ("latest", *listing.aliases, *listing.versions):
            assert index.resolve(EntryReference(name, version)) in listing.versions
        parse_reference(name)


def open_lockfile(data: bytes) -> None:
    read_lockfile(write_input(data))


def open_predictor(data: bytes) -> None:
    """Opens a predictor without observations, of a kind with options, and serves a token."""
    try:
        kind, options = (json.loads(data)[key] for key in ("kind", "options"))
    except (ValueError, RecursionError, TypeError, KeyError):
        return  # The manifest is refused.
    if not (isinstance(kind, str) and kind in STATEFUL and isinstance(options, dict)):
        return
    predictor = load_from_files(kind, SPEC, files=STATEFUL[kind], options=options)
    chosen_LTK = np.zeros((SPEC.num_layers, 1, 1), np.int64)
    serve(predictor, chosen_LTK, logits_LTE=np.zeros((SPEC.num_layers, 1, 4), np.float32))


def open_graph(data: bytes) -> None:
    """Checks and opens a graph: what is accepted has the declared shapes and can be run."""
    declared = check_graph(data, what="graph")
    network = Network(data)
    assert (declared.inputs, declared.outputs) == (network.inputs, network.outputs)
    given = {name: np.ones((2, *sizes), np.float32) for name, (_, *sizes) in network.inputs.items()}
    shapes = [(2, *sizes) for _, *sizes in network.outputs.values()]
    assert [array.shape for array in network.run(list(network.outputs), given)] == shapes
