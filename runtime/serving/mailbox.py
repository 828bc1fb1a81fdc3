"""From the engine thread to the event loop: what the choices of one request tell."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

from runtime.serving.choice import Choice, Ended, Event, Failed
from runtime.serving.orders import Order
from runtime.serving.service import Service


class ClientGone(Exception):
    """Nobody listens any more."""


class Quiet:
    """Nothing was told for a while."""


Queue = asyncio.Queue[tuple[int, list[Event]] | None]
"""A choice's number and what it tells; None: nobody listens any more."""


def _deliver(
    loop: asyncio.AbstractEventLoop, queue: Queue, index: int, events: list[Event]
) -> None:
    """In the engine thread. A loop that is closed has nobody who would listen.

    Not the mailbox's method: with its choices it would be a cycle, and Python looks for these
    rarely.
    """
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(queue.put_nowait, (index, events))


class Mailbox:
    """One request's choices: submitted together, heard together, cancelled together.

    What is in it is bounded by the tokens that the request may have.
    """

    def __init__(self, service: Service, order: Order, *, request_id: str):
        """Within the event loop."""
        self.order = order
        self._service = service
        self._queue: Queue = asyncio.Queue()
        deliver = partial(_deliver, asyncio.get_running_loop(), self._queue)
        self.choices = [
            Choice(
                prompt.tokens,
                order.sampling(number, choice),
                deliver=partial(deliver, number * order.num_choices + choice),
                request_id=request_id,
            )
            for number, prompt in enumerate(order.prompts)
            for choice in range(order.num_choices)
        ]

    def submit(self) -> None:
        """Raises what `Service.submit` raises."""
        self._service.submit(self.choices)

    def hang_up(self) -> None:
        """The client has gone: whoever listens hears ClientGone."""
        self._queue.put_nowait(None)

    async def events(
        self, quiet_seconds: float | None = None
    ) -> AsyncIterator[tuple[int, list[Event]] | Quiet]:
        """What each choice tells, until all have ended.

        Args:
            quiet_seconds: without anything told for so long, Quiet comes.

        Raises:
            RequestError: a choice failed; the others are cancelled.
            ClientGone: the client went; all are cancelled.
        """
        left = len(self.choices)
        while left:
            try:
                async with asyncio.timeout(quiet_seconds):
                    told = await self._queue.get()
            except TimeoutError:
                yield Quiet()
                continue
            if told is None:
                raise ClientGone
            for event in told[1]:
                if isinstance(event, Failed):
                    try:
                        raise event.error
                    finally:
                        # The error's traceback keeps this frame, which would keep the error.
                        del event, told
            left -= any(isinstance(event, Ended) for event in told[1])
            yield told

    def cancel(self) -> None:
        """Ends whatever has not ended."""
        open_choices = [choice for choice in self.choices if choice.reason is None]
        if open_choices:
            self._service.cancel(open_choices)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.order.prompts)

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def usage_log(self) -> dict[str, int]:
        """For the log's line."""
        return {
            "choices": len(self.choices),
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
        }
