"""Signatures of entries, in OpenSSF's model-signing format: whoever has that tool can check them.

What is signed is the entry's folder, every file of it by name and digest; the signature lies beside
them as `signature.json`.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from predictors.files import write_atomic
from zoo.entry import SIGNATURE, Entry, open_entry, strangers, write_folder
from zoo.errors import SignatureError, ZooError


def library() -> ModuleType:
    """model_signing; ZooError that says how to get it."""
    try:
        import model_signing
    except ImportError as error:
        raise ZooError(
            f"signatures need another package: pip install 'moecast[sign]' ({error})"
        ) from error
    return model_signing


def sign(folder: Path, *, key: Path) -> Path:
    """Signs an entry's folder with a private key (PEM, elliptic curve).

    Returns the signature's path. An earlier signature is replaced.

    Raises:
        ZooError: no entry, files that its manifest does not name, or no usable key.
        DamagedError: a file is not as promised.
    """
    entry = open_entry(folder)
    entry.verify()
    extra = strangers(folder, entry.manifest)
    if extra:
        raise ZooError(f"{folder} holds files that its manifest does not name: {extra}")
    signing = library()
    if not key.is_file():
        raise ZooError(
            f"{key}: no such key; openssl ecparam -name prime256v1 -genkey -noout -out {key}"
        )
    with tempfile.TemporaryDirectory() as temporary:
        signature = Path(temporary) / SIGNATURE
        try:
            signing.signing.Config().set_hashing_config(
                hashing(signing, folder)
            ).use_elliptic_key_signer(private_key=key).sign(folder, signature)
        except (ValueError, TypeError) as error:
            raise ZooError(
                f"{key} cannot sign: {error}; it must be an EC private key in PEM"
            ) from error
        write_atomic(folder / SIGNATURE, signature.read_bytes())
    return folder / SIGNATURE


def check_signature(entry: Entry, *, key: Path) -> None:
    """Every file of the entry is what the owner of this public key (PEM) signed.

    Raises:
        SignatureError: there is no signature, one by another key, or files that differ.
    """
    signing = library()
    name = entry.manifest.name
    if not key.is_file():
        raise ZooError(f"{key}: no such key; require_signature names a public key in PEM")
    signature = entry.signature()
    if signature is None:
        raise SignatureError(
            f"{name} in {entry.where} is not signed, and a signature by {key} is required; sign it "
            "with python -m zoo sign, or get it from who did"
        )
    with written(entry, signature) as folder:
        try:
            signing.verifying.Config().set_hashing_config(
                hashing(signing, folder)
            ).use_elliptic_key_verifier(public_key=key).verify(folder, folder / SIGNATURE)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SignatureError(
                f"{name} in {entry.where} is not what the owner of {key} signed: {error}"
            ) from error


def hashing(signing: ModuleType, folder: Path) -> object:
    """All files of the folder but the signature."""
    return signing.hashing.Config().set_ignored_paths(
        paths=[folder / SIGNATURE], ignore_git_paths=False
    )


@contextmanager
def written(entry: Entry, signature: bytes) -> Iterator[Path]:
    """The entry as a folder: itself where it is one, so that files nobody signed are seen."""
    if Path(entry.where, "manifest.json").is_file():
        yield Path(entry.where)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "entry"
        files = {path: entry.read(path) for path in entry.manifest.files}
        write_folder(folder, entry.manifest, files, signature)
        yield folder
