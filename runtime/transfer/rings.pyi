from collections.abc import Iterable

class Arrivals:
    """`ring.Arrivals`, for all kinds of rings.

    Raises:
        RuntimeError: In a process that was forked from the one that made it; so do its methods.
    """

    def post(self, ticket: int, status: int, seconds: float, /) -> None: ...
    def take(self) -> list[tuple[int, int, float, float]]: ...
    def wait(self, seconds: float, /) -> bool: ...

class FileRing:
    """Threads that read parts of files without the interpreter's lock; they start with a transfer.

    Args:
        arrivals: Where the transfers are posted that have ended.
        cpus: The processors that the threads run on; None: any.
        memory: Is kept as long as a read may write to it.

    Raises:
        OSError: No thread could be started, by `submit` and `replace_thread`.
        RuntimeError: In a process that was forked from the one that made it; so do its methods.
    """

    def __new__(
        cls,
        arrivals: Arrivals,
        num_threads: int,
        cpus: Iterable[int] | None = None,
        memory: object = None,
    ) -> FileRing: ...
    def submit(self, ticket: int, high: bool, parts: bytes, files: bytes, base: int = 0, /) -> None:
        """Starts a transfer.

        Args:
            parts: `file_ring.PART` of each part, in any order.
            files: Descriptors of each file, two integers of 32 bits: to read through the page
                cache, and past it (-1: none). They stay open until the transfer has arrived.
            base: Is added to the parts' addresses.

        Raises:
            RuntimeError: The ring is closed.
            ValueError: A part is invalid.
        """

    def cancel(self, ticket: int, /) -> bool: ...
    def running(self) -> list[tuple[int, float]]: ...
    def replace_thread(self, ticket: int, /) -> None: ...
    def close(self, seconds: float, /) -> bool: ...
