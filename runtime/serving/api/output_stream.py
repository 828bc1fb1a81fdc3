"""Carries the events of one request's choices from the engine thread to the event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

from runtime.generation.answer import FinishReason
from runtime.serving.api.generation_requests import GenerationRequest
from runtime.serving.choice import ChoiceEvent, CompletionChoice
from runtime.serving.errors import RequestError
from runtime.serving.service import GenerationService


class ClientDisconnected(Exception):
    """The client closed its connection."""


EventQueue = asyncio.Queue[tuple[int, list[ChoiceEvent]] | None]
"""Index of a choice and its events; None: the client has disconnected."""


def _deliver(
    loop: asyncio.AbstractEventLoop, queue: EventQueue, index: int, events: list[ChoiceEvent]
) -> None:
    """Put events into the queue; called in the engine thread.

    Not a method of the stream: with its choices that would be a reference cycle, which Python
    frees late. A closed loop has no reader.
    """
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(queue.put_nowait, (index, events))


class OutputStream:
    """One request's choices: submitted, read and cancelled together.

    The tokens that the request may generate bound its size. Create it within the event loop.
    """

    def __init__(self, service: GenerationService, request: GenerationRequest, *, request_id: str):
        self.request = request
        self._service = service
        self._queue: EventQueue = asyncio.Queue()
        deliver = partial(_deliver, asyncio.get_running_loop(), self._queue)
        self.choices = [
            CompletionChoice(
                prompt.tokens,
                request.sampling_params(prompt_index, number),
                deliver=partial(deliver, prompt_index * request.num_choices + number),
                request_id=request_id,
            )
            for prompt_index, prompt in enumerate(request.prompts)
            for number in range(request.num_choices)
        ]

    def submit(self) -> None:
        """Queue the choices; raises what `GenerationService.submit` raises."""
        self._service.submit(self.choices)

    def disconnect(self) -> None:
        """End `events` with ClientDisconnected."""
        self._queue.put_nowait(None)

    async def events(
        self, keep_alive_seconds: float | None = None
    ) -> AsyncIterator[tuple[int, list[ChoiceEvent]] | None]:
        """Yield the index of a choice and its new events, until all choices have ended.

        Args:
            keep_alive_seconds: yield None after this time without an event.

        Raises:
            RequestError: a choice failed.
            ClientDisconnected: the client went.
        """
        num_open = len(self.choices)
        while num_open:
            try:
                async with asyncio.timeout(keep_alive_seconds):
                    item = await self._queue.get()
            except TimeoutError:
                yield None
                continue
            if item is None:
                raise ClientDisconnected
            for event in item[1]:
                if isinstance(event, RequestError):
                    try:
                        raise event
                    finally:
                        # The error's traceback keeps this frame, which would keep the error.
                        del event, item
            num_open -= any(isinstance(event, FinishReason) for event in item[1])
            yield item

    def cancel(self) -> None:
        """End all choices that have not ended."""
        open_choices = [choice for choice in self.choices if choice.finish_reason is None]
        if open_choices:
            self._service.cancel(open_choices)

    def count_reused(self) -> int:
        """Tokens of the prompts that were computed for none of their answers."""
        n = self.request.num_choices
        return sum(
            min(choice.num_reused for choice in self.choices[first : first + n])
            for first in range(0, len(self.choices), n)
        )

    def usage(self) -> dict[str, int]:
        """Numbers of tokens, with OpenAI's keys."""
        return {
            "prompt_tokens": sum(len(prompt.tokens) for prompt in self.request.prompts),
            "completion_tokens": sum(choice.num_tokens for choice in self.choices),
        }
