"""Any altered byte of any file is refused by digest, before a parser sees it."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.entries import tiny_entry
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


def forbid_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, parsing fails the test."""

    def reached(*_: object, **__: object) -> None:
        raise AssertionError("parsed before its digest was checked")

    monkeypatch.setattr("onnx.load_model_from_string", reached)
    monkeypatch.setattr("safetensors.numpy.load", reached)
    monkeypatch.setattr("json.loads", reached)
    monkeypatch.setattr("huggingface_hub.ModelCard.__init__", reached)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_entry__refuses_damage_before_parsing(
    name: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_entry(tmp_path / "e")
    path = tmp_path / "e" / name
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    forbid_parsers(monkeypatch)
    if name.startswith("manifest"):
        monkeypatch.setattr("zoo.entry.parse_manifest", None)
    with pytest.raises(DamagedError, match="damaged"):
        open_entry(tmp_path / "e").read(name)


def test_entry__names_a_missing_file(tmp_path: Path) -> None:
    tiny_entry(tmp_path / "e")
    (tmp_path / "e/metrics.json").unlink()
    with pytest.raises(DamagedError, match=r"metrics\.json .* is missing"):
        open_entry(tmp_path / "e").verify()


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
def test_link__is_refused_though_its_bytes_are_right(
    linked: str, read: str, tmp_path: Path
) -> None:
    tiny_entry(tmp_path / "e")
    path = tmp_path / "e" / linked
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(ZooError, match="is a link"):
        open_entry(tmp_path / "e").read(read)
