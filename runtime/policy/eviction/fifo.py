"""First admitted first."""

from runtime.policy.eviction.lru import RecencyOrder
from runtime.policy.eviction.protocol import Eviction, EvictionPolicy, Expert


class ArrivalOrder(RecencyOrder):
    """Resident experts in the order of their admission; nothing else moves them."""

    def used(self, expert: Expert) -> None:
        pass

    def predicted(self, expert: Expert) -> None:
        pass


class Fifo(EvictionPolicy):
    """One of the baselines that promoe's code offers."""

    def part(self, *, num_slots: int, layers: range) -> Eviction:  # noqa: ARG002
        return ArrivalOrder()
