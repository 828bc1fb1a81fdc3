"""The interface of rings, which move experts' bytes into slots.

The model's thread owns everything that is known of transfers: it submits them, takes what has
arrived, and writes its books itself. Rings move bytes and know no cache.
"""

from collections.abc import Collection
from typing import Protocol

from runtime.errors import TransferError
from runtime.policy.tier import TransferTask

ARRIVED = 0
"""Status of a transfer whose bytes are all in the slot; those above 0 are numbers of errors
(`errno`)."""
END_OF_FILE = -1
DAMAGED = -2
"""A checksum is wrong."""
FAILED = -3
"""The error is the ring's `errors[ticket]`."""


class Ring:
    """Moves bytes. Only the model's thread uses it.

    A ticket is the number of one transfer, and no number is used twice.
    """

    can_join = False
    """Whether a computation can wait in place of the host."""
    errors: dict[int, TransferError]
    """Those of tickets that arrived as `FAILED`; the user of the ring removes them."""

    def has_room(self) -> bool:
        """Returns whether it takes another transfer now, a request or a prefetch."""
        return True

    def submit(self, ticket: int, task: TransferTask) -> None:
        """Starts the transfer after those submitted before, requested ones before all others."""
        raise NotImplementedError

    def cancel(self, ticket: int) -> bool:
        """Returns whether it had not begun: then it never does and is not reported."""
        raise NotImplementedError

    def poll(self) -> None:
        """Posts what has ended, where no thread does."""

    def wait_first(self) -> bool:
        """Waits for the oldest transfer of a ring without threads; False: there is none."""
        return False

    def join(self, ticket: int) -> None:
        """Lets the computation, in place of the host, wait for a transfer, if `can_join`.

        The slot may be computed with from then on. The transfer still arrives when it has ended.
        """

    def take_stall(self, ticket: int) -> float:  # noqa: ARG002
        """Returns the seconds that the computation waited for a transfer that was joined."""
        return 0.0

    def computed(self, slots: Collection[int]) -> None:
        """Lets the next transfers into the slots wait for the uses issued so far.

        Called after the last use. On the CPU the use has ended by then.
        """

    def wait_for_computation(self) -> None:
        """Lets all later transfers wait for what has been issued: a step ended within a use."""

    def settle(self, ticket: int, status: int) -> bool:  # noqa: ARG002
        """Looks at an arrival of this ring; returns False if the transfer goes on another way.

        It will arrive again. Each arrival is settled once.
        """
        return True

    def running(self) -> list[tuple[int, float]]:
        """Tickets of the transfers that run, each with the seconds since it began."""
        raise NotImplementedError

    def replace_thread(self, ticket: int) -> None:
        """Gives up the thread that runs the transfer; another takes its place.

        It ends when its transfer does, which is then reported as usual, but is not tried again.
        """

    def close(self, seconds: float) -> bool:
        """Drops what has not begun, and waits for the rest; may be called again.

        Returns:
            Whether all threads have ended; if not, those that hang are left behind.
        """
        raise NotImplementedError


class Arrivals(Protocol):
    """Transfers of all rings of a model that have ended, and the one place to wait for them."""

    def post(self, ticket: int, status: int, seconds: float, /) -> None:
        """Adds an arrival, from any thread; `seconds` is what the transfer took."""

    def take(self) -> list[tuple[int, int, float, float]]:
        """Removes all arrivals in their order; never waits.

        Returns:
            `(ticket, status, seconds, end)`: what the transfer took, and when it was posted, on
            `time.perf_counter`.
        """

    def wait(self, seconds: float, /) -> bool:
        """Waits at most so long until there is something to take; returns whether there is.

        Other threads run meanwhile, and an interrupt ends it.
        """
