"""Bounds that no server's settings have: bodies, and requests parsed and encoded at once.

Parsing JSON and validating it hold the event loop, and threads that encode texts compete for the
same processors: many requests that arrive together would delay the answer of `/health`. With a
bound, the event loop gets to everything else between two of them.
"""

import asyncio
from enum import IntEnum

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.serving.edge.middleware import OPEN_PATHS, read_header
from runtime.serving.errors import ErrorAnswer, RequestError, ServerBusy

BODY_SECONDS = 30.0
"""Timeout for a request's body."""
METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
SMALL_BYTES = 64 << 10
"""Bodies of more bytes are large."""
MAX_LARGE_BODIES = 16
"""Large bodies in memory at once, while they arrive or wait. A further one ends the one that has
been arriving for longest; it gets 503 if all the others have arrived."""
BUSY = f"too many bodies of more than {SMALL_BYTES} bytes arrive at once; try again later"


class BodySize(IntEnum):
    """Sizes wait in queues of their own, so that none waits for another."""

    NONE = 0
    SMALL = 1
    LARGE = 2


PARSED_AT_ONCE = {BodySize.NONE: 4, BodySize.SMALL: 4, BodySize.LARGE: 1}
PAUSE_SECONDS = {BodySize.NONE: 0.001, BodySize.SMALL: 0.001, BodySize.LARGE: 0.02}
"""Time before the next of several waiting requests. One round of the event loop does not suffice:
a request for `/health` takes about ten, from the connection to the answer."""


class ParseTurn:
    """One request's turn to be parsed; its answer ends it, or `release` before."""

    def __init__(self) -> None:
        self.size = BodySize.NONE
        self.deadline: asyncio.Timeout | None = None
        """Ends the read of the body; None once it has arrived."""
        self.is_displaced = False
        """The read was ended for another large body."""
        self._taken: asyncio.Semaphore | None = None

    def displace(self) -> None:
        assert self.deadline is not None
        if not self.deadline.expired():
            self.deadline.reschedule(asyncio.get_running_loop().time())
        self.is_displaced, self.deadline = True, None

    async def take(self, turns: asyncio.Semaphore) -> bool:
        """Wait for the turn; whether the request had to wait."""
        has_to_wait = turns.locked()
        await turns.acquire()
        self._taken = turns
        return has_to_wait

    def release(self) -> None:
        """Let the next request be parsed; further calls do nothing."""
        if self._taken is not None:
            self._taken.release()
            self._taken = None


class BodyLimitMiddleware:
    """Reads the whole body, up to a size and within a timeout; accepts JSON only.

    Requiring the content type blocks forms of other web pages: browsers send them without asking,
    but not as application/json.

    The application is called when it is the request's turn. Its answer ends the turn; a route that
    parses first and answers much later releases `request.state.parse_turn` in between.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_seconds: float):
        self._app, self._max_bytes, self._timeout_seconds = app, max_bytes, timeout_seconds
        self._turns = {size: asyncio.Semaphore(PARSED_AT_ONCE[size]) for size in BodySize}
        self._large_bodies: dict[ParseTurn, None] = {}
        """In the order in which they became large."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        turn = ParseTurn()

        async def send_and_release(message: Message) -> None:
            self._end(turn)
            await send(message)

        try:
            content: bytes | None = b""
            if scope["method"] in METHODS_WITH_BODY:
                content = await self._read(scope, receive, turn)
            if content is not None and await self._wait(turn, receive):
                scope.setdefault("state", {})["parse_turn"] = turn
                again = replay_body(content, receive)
                content = b""  # large bodies are freed once they are parsed
                await self._app(scope, again, send_and_release)
        except RequestError as error:
            await ErrorAnswer(error)(scope, receive, send)
        finally:
            self._end(turn)

    def _end(self, turn: ParseTurn) -> None:
        turn.release()
        self._large_bodies.pop(turn, None)

    async def _wait(self, turn: ParseTurn, receive: Receive) -> bool:
        """Wait until the request may be parsed; False if the client has disconnected meanwhile."""
        if not await turn.take(self._turns[turn.size]):
            return True
        await asyncio.sleep(PAUSE_SECONDS[turn.size])
        return not await has_disconnected(receive)

    async def _read(self, scope: Scope, receive: Receive, turn: ParseTurn) -> bytes | None:
        """The body; None if the client has disconnected.

        Raises:
            RequestError: it is too large, too slow or not JSON, or others take the memory.
        """
        length = read_header(scope, b"content-length") or b""
        if length.isdigit() and int(length[:20]) > self._max_bytes:
            raise self._too_large()
        kind = (read_header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            problem = "the body must be JSON: send Content-Type: application/json"
            raise RequestError(problem, status=415)
        content = bytearray()
        try:
            async with asyncio.timeout(self._timeout_seconds) as turn.deadline:
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    content += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(content) > self._max_bytes:
                        raise self._too_large()
                    self._grow(turn, len(content))
        except TimeoutError:
            if turn.is_displaced:
                raise ServerBusy(BUSY) from None
            problem = f"the body did not arrive within {self._timeout_seconds:g} s"
            raise RequestError(problem, status=408) from None
        finally:
            turn.deadline = None
        return bytes(content)

    def _grow(self, turn: ParseTurn, num_bytes: int) -> None:
        """Note the size that a body has by now; a further large one displaces another."""
        if num_bytes > SMALL_BYTES and turn.size is not BodySize.LARGE:
            if len(self._large_bodies) >= MAX_LARGE_BODIES:
                arriving = (other for other in self._large_bodies if other.deadline is not None)
                displaced = next(arriving, None)
                if displaced is None:
                    raise ServerBusy(BUSY)
                displaced.displace()
                del self._large_bodies[displaced]
            turn.size = BodySize.LARGE
            self._large_bodies[turn] = None
        elif num_bytes and turn.size is BodySize.NONE:
            turn.size = BodySize.SMALL

    def _too_large(self) -> RequestError:
        problem = f"the body is larger than {self._max_bytes} bytes; raise max_body, or send less"
        return RequestError(problem, status=413)


def replay_body(content: bytes, receive: Receive) -> Receive:
    """A receive function that returns the whole body first, then what `receive` returns."""
    message: Message | None = {"type": "http.request", "body": content, "more_body": False}
    del content

    async def receive_again() -> Message:
        nonlocal message
        first, message = message, None
        return first or await receive()

    return receive_again


async def has_disconnected(receive: Receive) -> bool:
    """Whether the client has closed its connection, after the body has been received."""
    try:
        async with asyncio.timeout(0):
            return (await receive())["type"] == "http.disconnect"
    except TimeoutError:
        return False
