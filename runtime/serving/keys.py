"""Which keys clients may show, and whether one of them was shown."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from predictors.errors import MoecastError

VARIABLE = "MOECAST_API_KEY"
FROM_FILE = "@"


def keys_of(key: str | None, environment: Mapping[str, str]) -> frozenset[str]:
    """The keys that are configured; none when there is none.

    Args:
        key: several with commas between them, or @FILE with one a line; None: the environment's.

    Raises:
        MoecastError: there is something, but no key in it, or one that no header can carry.
    """
    source = "key"
    if key is None:
        source, key = VARIABLE, environment.get(VARIABLE)
    if key is None:
        return frozenset()
    if key.startswith(FROM_FILE):
        path = Path(key[1:]).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MoecastError(f"{source}=@{path}: it can not be read ({error})") from error
        found = [line.strip() for line in text.splitlines()]
    else:
        found = [one.strip() for one in key.split(",")]
    keys = frozenset(one for one in found if one)
    if not keys:
        raise MoecastError(f"{source} is set, but holds no key; leave it out, or write one")
    if any(not one.isascii() or not one.isprintable() or " " in one for one in keys):
        raise MoecastError(f"{source}: a key has characters that no header carries; use letters")
    return keys


class Keys:
    """Keeps digests only; compares in constant time, with all of them whatever comes first."""

    def __init__(self, keys: Iterable[str]):
        self._digests = [digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, authorization: bytes) -> bool:
        """Whether an Authorization header shows a key: `Bearer KEY`, or `Basic` with the key for a
        password, which is what browsers can send.
        """
        scheme, _, shown = authorization.strip().partition(b" ")
        shown = shown.strip()
        if scheme.lower() == b"basic":
            shown = password_of(shown)
        elif scheme.lower() != b"bearer":
            shown = b""
        found = digest(shown)
        return any([hmac.compare_digest(found, one) for one in self._digests])


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def password_of(credentials: bytes) -> bytes:
    """Of Basic credentials; empty when they are none."""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
