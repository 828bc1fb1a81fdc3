"""Signatures: made, carried along, and refused when anything differs."""

import json
import shutil
from pathlib import Path

import pytest

from tests.builders.entries import tiny_entry
from tests.builders.web import served
from tests.builders.zoos import zoo
from zoo.entry import open_entry
from zoo.errors import DamagedError, SignatureError, ZooError
from zoo.load import find_entry
from zoo.signing import check_index_signature, check_signature, index_signature_path, sign_folder
from zoo.storage.folder import FolderStorage

pytest.importorskip("model_signing", reason="model-signing is not installed (extra: sign)")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two pairs of keys, in PEM."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("keys")
    pem, pkcs8 = form.Encoding.PEM, form.PrivateFormat.PKCS8
    for name in ("ours", "theirs"):
        key = ec.generate_private_key(ec.SECP256R1())
        (folder / name).write_bytes(key.private_bytes(pem, pkcs8, form.NoEncryption()))
        public = key.public_key().public_bytes(pem, form.PublicFormat.SubjectPublicKeyInfo)
        (folder / f"{name}.pub").write_bytes(public)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def signed(entry: Path, keys: dict[str, Path]) -> Path:
    assert zoo("sign", entry, f"key={keys['ours']}") == 0
    return entry


@pytest.fixture
def far(signed: Path, tmp_path: Path, keys: dict[str, Path]) -> Path:
    """A zoo with a signed index."""
    assert zoo("push", signed, f"zoo={tmp_path / 'far'}", f"key={keys['ours']}") == 0
    return tmp_path / "far"


def test_signature__travels_with_the_entry(signed, far, keys, monkeypatch):
    ours, theirs = keys["ours.pub"], keys["theirs.pub"]
    assert zoo("verify", signed, f"require_signature={ours}") == 0
    with served(far) as (address, _):
        pull = ("pull", "tiny/stride", f"zoo={address}")
        assert zoo(*pull, f"require_signature={theirs}") == 2
        with pytest.raises(Exception, match="unknown zoo entry"):
            find_entry("tiny/stride")
        assert zoo(*pull, f"require_signature={ours}") == 0
    check_signature(find_entry("tiny/stride"), key=ours)
    monkeypatch.setenv("MOECAST_REQUIRE_SIGNATURE", str(theirs))
    with pytest.raises(SignatureError, match="is not what the owner of"):
        find_entry("tiny/stride")


def test_signature__is_of_all_files_as_they_are(signed: Path, keys: dict[str, Path]) -> None:
    def refuse(message: str) -> None:
        with pytest.raises(SignatureError, match=message):
            check_signature(open_entry(signed), key=keys["ours.pub"])

    (signed / "extra.md").write_text("x")
    refuse("extra")
    signature = (signed / "signature.json").read_bytes()
    tiny_entry(signed, licence="MIT")
    refuse("is not signed")
    (signed / "signature.json").write_bytes(signature)
    refuse("is not what the owner of")
    for damage in (b"", b"{}", b"[]", b"\xff", b'{"dsseEnvelope": 3}'):
        (signed / "signature.json").write_bytes(damage)
        refuse("is not what the owner of")


def test_wrong_keys__are_named(entry: Path, tmp_path: Path, keys: dict[str, Path]) -> None:
    (tmp_path / "bad.pem").write_text("x")
    for wrong in ("nowhere.pem", tmp_path / "bad.pem"):
        assert zoo("sign", entry, f"key={wrong}") == 2
    assert not (entry / "signature.json").exists()
    sign_folder(entry, key=keys["ours"])
    for wrong in ("nowhere.pub", tmp_path / "bad.pem"):
        assert zoo("verify", entry, f"require_signature={wrong}") == 2


def test_signature__is_that_of_the_bytes_that_are_loaded(signed, tmp_path, keys):
    """The folder is exchanged for a signed one after the unsigned manifest was read."""
    tiny_entry(tmp_path / "forged", licence="MIT")
    (tmp_path / "forged/signature.json").write_bytes((signed / "signature.json").read_bytes())
    entry = open_entry(tmp_path / "forged")
    shutil.rmtree(tmp_path / "forged")
    shutil.copytree(signed, tmp_path / "forged")
    with pytest.raises((SignatureError, DamagedError)):
        check_signature(entry, key=keys["ours.pub"])


def test_index__must_be_signed_where_signatures_are_required(far, keys, monkeypatch, refused):
    index = far / "index.json"
    good = index.read_bytes()
    require = f"require_signature={keys['ours.pub']}"
    for change in ({"serial": 9}, {"entries": {}}, {"surprise": 1}, {}):
        index.write_text(json.dumps({**json.loads(good), **change}))
        assert zoo("pull", "tiny/stride", f"zoo={far}", require) == 2
        with monkeypatch.context() as required:
            required.setenv("MOECAST_REQUIRE_SIGNATURE", str(keys["ours.pub"]))
            assert zoo("pull", "tiny/stride", f"zoo={far}") == 2
            required.setenv("MOECAST_ZOO", str(far))
            with pytest.raises(ZooError):
                find_entry("tiny/stride")
        # The signature of the earlier index does not help.
        (signature,) = (far / "signatures").iterdir()
        if "surprise" not in change:
            copy = far / index_signature_path(index.read_bytes())
            copy.write_bytes(signature.read_bytes())
            assert "is not what the owner" in refused("pull", "tiny/stride", f"zoo={far}", require)
            copy.unlink()
    index.write_bytes(good)
    assert zoo("pull", "tiny/stride", f"zoo={far}", require) == 0


def test_lock__of_an_unsigned_zoo_is_refused_where_signatures_are_required(
    far, signed, tmp_path, keys, monkeypatch, refused
):
    monkeypatch.setenv("MOECAST_REQUIRE_SIGNATURE", str(keys["ours.pub"]))
    assert zoo("pull", "tiny/stride", f"zoo={far}") == 0
    assert zoo("push", signed, f"zoo={tmp_path / 'unsigned'}") == 0
    lock = ("lock", f"output={tmp_path / 'zoo.lock'}")
    assert "unsigned is not signed" in refused(*lock, f"zoo={tmp_path / 'unsigned'}")
    assert zoo(*lock, f"zoo={far}") == 0


def test_signed_index__is_changed_with_the_key_only(far, tmp_path, keys, refused):
    before = (far / "index.json").read_bytes()
    tiny_entry(tmp_path / "m", name="tiny/mlp")
    tiny_entry(tmp_path / "more/token", name="tiny/token")
    for command in (("push", tmp_path / "m"), ("rm", "tiny/stride"), ("push", tmp_path / "more")):
        assert zoo(*command, f"zoo={far}") == 2
        assert "is not signed with key=" in refused(*command, f"zoo={far}", f"key={keys['theirs']}")
        assert (far / "index.json").read_bytes() == before
        check_index_signature(FolderStorage(far), before, key=keys["ours.pub"])
        assert zoo(*command, f"zoo={far}", f"key={keys['ours']}") == 0
        data = (far / "index.json").read_bytes()
        check_index_signature(FolderStorage(far), data, key=keys["ours.pub"])
        with pytest.raises(SignatureError, match="is not what the owner"):
            check_index_signature(FolderStorage(far), data, key=keys["theirs.pub"])
        assert len(list((far / "signatures").iterdir())) == 1
        before = data
    assert zoo("push", tmp_path / "m", f"zoo={far}", f"key={keys['theirs']}") == 2
    assert zoo("gc", f"zoo={far}") == 0
    check_index_signature(FolderStorage(far), before, key=keys["ours.pub"])
