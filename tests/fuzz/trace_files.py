"""`trace.json` of a trace."""

from collect.traces.checks import check_manifest
from collect.traces.manifest import MANIFEST, hash_value, read_manifest
from tests.fuzz.mutation import change_fields
from tests.fuzz.zoo_files import MemoryStorage


def open_manifest(data: bytes) -> None:
    """Opens a trace by its manifest, also after its digest was computed anew."""
    for form in (data, change_fields(data, with_digest)):
        try:
            manifest = read_manifest(MemoryStorage({MANIFEST: form}))
        except ValueError:
            if form is data:
                continue
            raise
        check_manifest(manifest, "memory")
        assert manifest.num_tokens >= 0


def with_digest(fields: dict) -> dict:
    """Returns the manifest with the digest of its values."""
    fields.pop("digest", None)
    return {**fields, "digest": hash_value(fields)}
