"""Nothing waits for the disk: what was written is there after a kill without it, too."""

from tests.unit.zoo.conftest import no_waits_for_the_disk

__all__ = ["no_waits_for_the_disk"]
