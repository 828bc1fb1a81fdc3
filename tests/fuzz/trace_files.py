"""`trace.json` of a trace."""

import json

from collect.traces.checks import check_manifest
from collect.traces.manifest import MANIFEST, hash_value, read_manifest
from tests.fuzz.zoo_files import MemoryStorage


def open_manifest(data: bytes) -> None:
    """Opens a trace by its manifest, also after its digest was computed anew."""
    for form in (data, with_digest(data)):
        try:
            manifest = read_manifest(MemoryStorage({MANIFEST: form}))
        except ValueError:
            if form is data:
                continue
            raise
        check_manifest(manifest, "memory")
        assert manifest.num_tokens >= 0


def with_digest(data: bytes) -> bytes:
    """Returns the manifest with the digest of its values; other bytes as they are."""
    try:
        fields = json.loads(data)
        fields.pop("digest", None)
        return json.dumps({**fields, "digest": hash_value(fields)}).encode()
    except (ValueError, RecursionError, TypeError, AttributeError):
        return data
