"""API keys: where they are configured, and whether a request has a valid one."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Mapping

from predictors.errors import MoecastError
from predictors.files import expand_home
from zoo.digest import refuse_pipes

KEY_VARIABLE = "MOECAST_API_KEY"
FILE_PREFIX = "@"


def load_api_keys(key: str | None, environment: Mapping[str, str]) -> frozenset[str]:
    """The configured keys; empty if there are none.

    Args:
        key: keys separated by commas, or @FILE with one on each line; None: the environment's.

    Raises:
        MoecastError: the option is set but holds no key, or one that no header can carry.
    """
    source = "api_key"
    if key is None:
        source, key = KEY_VARIABLE, environment.get(KEY_VARIABLE)
    if key is None:
        return frozenset()
    if key.startswith(FILE_PREFIX):
        path = expand_home(key[1:])
        try:
            text = refuse_pipes(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MoecastError(f"{source}=@{path}: cannot read the file ({error})") from error
        entries = text.splitlines()
    else:
        entries = key.split(",")
    keys = frozenset(entry.strip() for entry in entries) - {""}
    if not keys:
        raise MoecastError(f"{source} is set but holds no key; set a key, or leave it out")
    if any(not entry.isascii() or not entry.isprintable() or " " in entry for entry in keys):
        raise MoecastError(
            f"{source}: a key has characters that an HTTP header cannot carry; use ASCII letters "
            "and digits"
        )
    return keys


class ApiKeys:
    """Keeps digests of the keys only, and compares with all of them in constant time."""

    def __init__(self, keys: Iterable[str]):
        self._digests = [digest(key.encode()) for key in keys]

    def accept(self, authorization: bytes) -> bool:
        """Whether an Authorization header has a valid key.

        Accepts `Bearer KEY`, and `Basic` with the key as the password, which browsers can send.
        """
        scheme, _, key = authorization.strip().partition(b" ")
        key = key.strip()
        if scheme.lower() == b"basic":
            try:
                key = base64.b64decode(key, validate=True).partition(b":")[2]
            except binascii.Error:
                key = b""
        elif scheme.lower() != b"bearer":
            key = b""
        given = digest(key)
        return any([hmac.compare_digest(given, valid) for valid in self._digests])


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
