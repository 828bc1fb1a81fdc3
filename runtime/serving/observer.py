"""Who is told what the service does, such as metrics and logs."""

from runtime.serving.choice import Choice
from runtime.serving.errors import RequestError


class Observer:
    """Does nothing; whoever wants to know overrides what it is about.

    A choice carries its counts and times. Called by the thread in which it happened: `refused` and
    `queued` by the one that asks, `ended` of a choice that never started by the one that cancels,
    all others by the engine's. None may block or raise.
    """

    def refused(self, error: RequestError) -> None:
        """Nobody generates for this request: the queue is full, the server loads or ends."""

    def queued(self, choice: Choice) -> None:
        """It waits for its turn."""

    def started(self, choice: Choice) -> None:
        """It is generated from now on."""

    def stepped(self, seconds: float, choices: list[Choice]) -> None:
        """One forward pass of these together, each of which told what it had."""

    def ended(self, choice: Choice) -> None:
        """It ended, for its `reason`; it may never have started."""

    def rested(self) -> None:
        """Nothing has run or waited for a moment (`Service`'s `rest_seconds`).

        Told once, until something runs again.
        """
