"""The disk space that a training needs, checked before it writes anything."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from collect.errors import DiskSpaceError

COPIES = 11
"""Times that the weights' bytes are on the disk at most: the resumable checkpoint with Adam's two
moments (3), the one before it (3), the one that replaces it (3), the best weights and the entries.
"""
SPARE_BYTES = 32 << 20
"""Results, curves and the report."""


def require_training_space(run_dir: Path, networks: Iterable[nn.Module]) -> None:
    """Raises DiskSpaceError if checkpoints and entries of the networks do not fit on the disk."""
    weights = sum(p.nbytes for network in networks for p in network.parameters())
    needed = COPIES * weights + SPARE_BYTES
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise DiskSpaceError(
            f"{run_dir}: training needs up to {needed:,} bytes for checkpoints and zoo entries, "
            f"{free:,} are free. Free some, or choose a folder on another disk (run_dir=PATH)"
        )
