"""Pulls an entry from Python, as `moecast zoo pull` does."""

from pathlib import Path

from zoo.commands.pull import pull_entries
from zoo.config import PullConfig
from zoo.entry import ZooEntry


def pull(
    name: str,
    *,
    zoo: str | None = None,
    output: str | Path | None = None,
    require_signature: str | Path | None = None,
) -> ZooEntry:
    """Copies an entry into the user's zoo, from which `load` finds it without a network.

    Args:
        name: NAME, NAME@latest, NAME@ALIAS or NAME@DIGEST.
        zoo: zoos to pull from, separated by commas, in order of preference; default: MOECAST_ZOO.
        output: folder to write the entry to as well.
        require_signature: public key (PEM) with which the zoo's index and the entry must be signed.

    Raises:
        ZooError: there is no such zoo or entry, or what arrived is damaged.

    Example:
        >>> entry = pull("qwen2-moe-tiny/stride", zoo="builtin")
        >>> entry.manifest.kind
        'stride'
    """
    (entry,) = pull_entries(
        PullConfig(
            name=name,
            zoo=zoo,
            output=None if output is None else Path(output),
            require_signature=None if require_signature is None else Path(require_signature),
        )
    )
    return entry
