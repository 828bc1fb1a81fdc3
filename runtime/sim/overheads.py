"""Costs of a live run in addition to computing and copying, as far as they were measured."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Further costs; by default none: a described machine computes and copies at full speed."""

    step_seconds: float = 0.0
    """Time of a forward pass outside of its layers: embedding, head, the hooks at both ends."""
    task_seconds: float = 0.0
    """Time of a transfer thread between two transfers: twice the lock and the interpreter, the
    queue, and being woken after a wait."""
    predictor_inline: bool = False
    """The predictor runs on the thread that computes, which waits for it; off: in parallel."""
    computation_reads: bool = False
    """While it waits, the computing thread does requested transfers itself, in parallel with the
    link's thread (`runtime.transfer.worker`)."""
    transfer_speed_together: float = 1.0
    """Speed of each of two simultaneous transfers over one link, against one alone: .5 where they
    share a bandwidth, 1 where the link serves both at full speed."""
    transfer_speed_computing: float = 1.0
    """Speed of a transfer during a computation, for the same reasons as below."""
    compute_speed_transferring: float = 1.0
    """Speed of the computation during a transfer of another thread: both use the processor, the
    memory and the interpreter's lock."""
