"""Any altered byte of any file is refused by digest, before a parser sees it."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from zoo.digest import check_path
from zoo.entry import open_entry
from zoo.errors import DamagedError, ZooError

FILES = [
    "manifest.json",
    "manifest.sha256",
    "metrics.json",
    "README.md",
    "weights.safetensors",
    "predictors/layer-00.onnx",
]


def flipped(data: bytes) -> bytes:
    """One bit, anywhere; the same place for the same bytes."""
    position = random.Random(len(data)).randrange(len(data) * 8)
    changed = bytearray(data)
    changed[position // 8] ^= 1 << (position % 8)
    return bytes(changed)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "flipped bit": flipped,
    "truncated": lambda data: data[:-1],
    "empty": lambda _: b"",
    "appended byte": lambda data: data + b"\n",
}


PARSERS = (
    *("onnx.load_model_from_string", "safetensors.numpy.load", "json.loads"),
    *("huggingface_hub.ModelCard.__init__", "zoo.entry.parse_manifest"),
)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_entry__refuses_damage_before_parsing(name, damage, entry, monkeypatch):
    path = entry / name
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    for parser in PARSERS if name.startswith("manifest") else PARSERS[:-1]:
        monkeypatch.setattr(parser, None)
    with pytest.raises(DamagedError, match="damaged"):
        open_entry(entry).read(name)


def test_entry__names_a_missing_file(entry: Path) -> None:
    (entry / "metrics.json").unlink()
    with pytest.raises(DamagedError, match=r"metrics\.json .* is missing"):
        open_entry(entry).verify()


@pytest.mark.parametrize(
    "path",
    ["../x.json", "/etc/passwd", "a/../../x.json", "a//b.json", "./a.json", "", ".hidden.json",
     "a\\b.json", "C:/x.json", "a/", "a\0b.json"],
)  # fmt: skip
def test_path__outside_the_entry_is_refused(path: str) -> None:
    with pytest.raises(ZooError, match="not allowed"):
        check_path(path)


@pytest.mark.parametrize(
    ("linked", "read"),
    [("metrics.json", "metrics.json"), ("predictors", "predictors/layer-00.onnx")],
)
def test_link__is_refused_though_its_bytes_are_right(linked: str, read: str, entry: Path) -> None:
    outside = (entry / linked).rename(entry.parent / "outside")
    (entry / linked).symlink_to(outside)
    with pytest.raises(ZooError, match="is a link"):
        open_entry(entry).read(read)
