"""Signatures of entries and indexes in OpenSSF's model-signing format.

An entry's signature covers every file of its folder by name and digest; it is stored there as
`signature.json`, and model-signing's own tool can check it too. That of an index is stored as
`signatures/DIGEST.json`, by the digest of the index, so that both change in one step.
"""

import os
import tempfile
from pathlib import Path
from types import ModuleType

from predictors.files import write_atomic
from zoo.digest import hash_bytes
from zoo.entry import MAX_SIGNATURE_BYTES, SIGNATURE, ZooEntry, open_entry, write_folder
from zoo.errors import DamagedError, SignatureError, ZooError
from zoo.index import INDEX, SIGNATURES
from zoo.storage.base import Storage

REQUIRE_SIGNATURE = "MOECAST_REQUIRE_SIGNATURE"
"""Path of a public key. Entries that are not signed with it are refused, except built-in ones."""


def required_key() -> Path | None:
    """Returns the public key of MOECAST_REQUIRE_SIGNATURE; None if it is not set."""
    key = os.environ.get(REQUIRE_SIGNATURE)
    return Path(key) if key else None


def import_model_signing() -> ModuleType:
    """Imports model_signing; ZooError says how to install it."""
    try:
        import model_signing
    except ImportError as error:
        raise ZooError(
            f"signatures need another package; install it: pip install 'moecast[sign]' ({error})"
        ) from error
    return model_signing


def sign_folder(folder: Path, *, key: Path) -> Path:
    """Signs an entry's folder with a private key (PEM, elliptic curve).

    Returns the signature's path. An earlier signature is replaced. Raises ZooError if there is no
    entry or no usable key, DamagedError if a file differs from the manifest, or is not in it.
    """
    entry = open_entry(folder)
    entry.verify()
    write_atomic(folder / SIGNATURE, _sign(folder, key=key))
    return folder / SIGNATURE


def sign_index(data: bytes, *, key: Path) -> bytes:
    """Returns the signature of `index.json`; raises ZooError if the key is not usable."""
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / INDEX).write_bytes(data)
        return _sign(Path(temporary), key=key)


def check_signature(entry: ZooEntry, *, key: Path) -> None:
    """Checks that the owner of this public key (PEM) signed every file of the entry.

    A copy is checked, made of the bytes that `entry` reads: its folder may be exchanged meanwhile.
    The manifest in memory is then the signed one, and every later read is checked
    against it. Raises SignatureError if there is no signature, it is by another key, or files
    differ, or if the entry's folder has other files.
    """
    name = entry.manifest.name
    require_public_key(key)
    signature = entry.read_signature()
    if signature is None:
        raise SignatureError(
            f"{name} in {entry.where} is not signed, and a signature by {key} is required; sign it "
            "with moecast zoo sign, or pull a signed version"
        )
    try:
        entry.require_listed_files()
    except DamagedError as error:
        raise SignatureError(f"{error}; they are not signed") from error
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "entry"
        files = {path: entry.read(path) for path in entry.manifest.files}
        write_folder(folder, entry.manifest, files, signature)
        _verify(folder, key=key, what=f"{name} in {entry.where}")


def check_index_signature(storage: Storage, data: bytes, *, key: Path) -> None:
    """Checks that the owner of this public key signed `data`, the storage's index.

    Without it, a server could list as the latest a signed version that its owner never did.
    Raises SignatureError if there is no signature, or it is by another key or of another index.
    """
    require_public_key(key)
    what = f"the index of {storage.address}"
    try:
        signature = storage.read(index_signature_path(data), limit=MAX_SIGNATURE_BYTES)
    except FileNotFoundError as error:
        raise SignatureError(
            f"{what} is not signed, and a signature by {key} is required; its owner signs it with "
            "moecast zoo push PATH key=KEY.pem"
        ) from error
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / INDEX).write_bytes(data)
        (Path(temporary) / SIGNATURE).write_bytes(signature)
        _verify(Path(temporary), key=key, what=what)


def require_owner(storage: Storage, data: bytes, *, key: Path) -> None:
    """Checks that `data`, the storage's index, is signed with this usable private key."""
    from OpenSSL import crypto

    private = crypto.load_privatekey(crypto.FILETYPE_PEM, key.read_bytes())
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(crypto.dump_publickey(crypto.FILETYPE_PEM, private))
        try:
            check_index_signature(storage, data, key=Path(file.name))
        except SignatureError as error:
            raise SignatureError(
                f"the index of {storage.address} is not signed with key={key}: give its owner's "
                f"private key; its owner takes another by removing {index_signature_path(data)}"
            ) from error


def index_signature_path(data: bytes) -> str:
    """Returns the path of the signature of the index with these bytes."""
    return f"{SIGNATURES}/{hash_bytes(data)}.json"


def require_public_key(key: Path) -> None:
    import_model_signing()
    if not key.is_file():
        raise ZooError(f"{key}: no such file; require_signature takes a public key in PEM")


def _sign(folder: Path, *, key: Path) -> bytes:
    """Returns the signature of a folder's files."""
    signing = import_model_signing()
    if not key.is_file():
        raise ZooError(
            f"{key}: no such file; make a key: openssl ecparam -name prime256v1 -genkey -noout "
            f"-out {key}"
        )
    with tempfile.TemporaryDirectory() as temporary:
        signature = Path(temporary) / SIGNATURE
        try:
            signing.signing.Config().set_hashing_config(
                configure_hashing(signing, folder)
            ).use_elliptic_key_signer(private_key=key).sign(folder, signature)
        except (ValueError, TypeError) as error:
            raise ZooError(
                f"{key} cannot sign: {error}; it must be an EC private key in PEM"
            ) from error
        return signature.read_bytes()


def _verify(folder: Path, *, key: Path, what: str) -> None:
    signing = import_model_signing()
    try:
        signing.verifying.Config().set_hashing_config(
            configure_hashing(signing, folder)
        ).use_elliptic_key_verifier(public_key=key).verify(folder, folder / SIGNATURE)
    except Exception as error:  # also what the formats' own parsers raise
        raise SignatureError(f"{what} is not what the owner of {key} signed: {error}") from error


def configure_hashing(signing: ModuleType, folder: Path) -> object:
    """Configures hashing of all files of the folder but the signature."""
    return signing.hashing.Config().set_ignored_paths(
        paths=[folder / SIGNATURE], ignore_git_paths=False
    )
