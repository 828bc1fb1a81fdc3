"""Signatures of entries in OpenSSF's model-signing format, whose own tool can check them too.

A signature covers every file of the entry's folder by name and digest; it is stored there as
`signature.json`.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from predictors.files import write_atomic
from zoo.entry import MANIFEST, SIGNATURE, ZooEntry, open_entry, require_tracked_files, write_folder
from zoo.errors import SignatureError, ZooError


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
    require_tracked_files(folder, entry.manifest)
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
        write_atomic(folder / SIGNATURE, signature.read_bytes())
    return folder / SIGNATURE


def check_signature(entry: ZooEntry, *, key: Path) -> None:
    """Checks that the owner of this public key (PEM) signed every file of the entry.

    Raises SignatureError if there is no signature, it is by another key, or files differ.
    """
    signing = import_model_signing()
    name = entry.manifest.name
    if not key.is_file():
        raise ZooError(f"{key}: no such file; require_signature takes a public key in PEM")
    signature = entry.read_signature()
    if signature is None:
        raise SignatureError(
            f"{name} in {entry.where} is not signed, and a signature by {key} is required; sign it "
            "with moecast zoo sign, or pull a signed version"
        )
    with open_as_folder(entry, signature) as folder:
        try:
            signing.verifying.Config().set_hashing_config(
                configure_hashing(signing, folder)
            ).use_elliptic_key_verifier(public_key=key).verify(folder, folder / SIGNATURE)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SignatureError(
                f"{name} in {entry.where} is not what the owner of {key} signed: {error}"
            ) from error


def configure_hashing(signing: ModuleType, folder: Path) -> object:
    """Configures hashing of all files of the folder but the signature."""
    return signing.hashing.Config().set_ignored_paths(
        paths=[folder / SIGNATURE], ignore_git_paths=False
    )


@contextmanager
def open_as_folder(entry: ZooEntry, signature: bytes) -> Iterator[Path]:
    """Yields the entry's own folder, so that unsigned files in it are found, or else a copy."""
    if Path(entry.where, MANIFEST).is_file():
        yield Path(entry.where)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "entry"
        files = {path: entry.read(path) for path in entry.manifest.files}
        write_folder(folder, entry.manifest, files, signature)
        yield folder
