"""Memory that a computation takes, by PyTorch's own account."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def measure_allocated(computation: Callable[[], object]) -> int:
    """Most bytes at one moment by the account of PyTorch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        computation()
    live = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most
