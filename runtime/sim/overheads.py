"""What a live run pays beside computing and copying, as far as it was measured."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Nothing, unless measured: a described machine computes and copies at full speed at once.

    Times in seconds.
    """

    step_seconds: float = 0.0
    """A forward pass outside its layers: embedding, head, the hooks at both ends."""
    task_seconds: float = 0.0
    """A transfer thread between two transfers: two turns at the lock and the interpreter, the
    queue, and, after waiting, its being woken."""
    predictor_inline: bool = False
    """The predictor runs on the thread that computes, which waits for it; else beside it."""
    computation_reads: bool = False
    """While it waits, the computation brings by itself what was asked for, beside the link's own
    thread (`runtime.transfer.worker.TransferWorker.help`)."""
    transfer_speed_together: float = 1.0
    """Speed of each of two transfers over one link at a time, against one alone: .5 where they
    share a bandwidth, 1 where the link serves both as it serves one."""
    transfer_speed_computing: float = 1.0
    """Speed of a transfer while the computation computes, for the same reasons as below."""
    compute_speed_transferring: float = 1.0
    """Speed of the computation while a transfer that it does not do itself is under way: both use
    the processor, the memory and the interpreter's lock."""
