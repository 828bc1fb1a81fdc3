"""No network where the user said so."""

import os

from zoo.errors import UnreachableError

OFFLINE = "MOECAST_OFFLINE"


def refuse_when_offline(address: str) -> None:
    """UnreachableError when MOECAST_OFFLINE is set to anything but 0."""
    if os.environ.get(OFFLINE, "0") not in ("", "0"):
        raise UnreachableError(
            f"{address} is on the network, and {OFFLINE} is set; unset it, or name a folder"
        )
