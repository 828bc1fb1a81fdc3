"""The wait policy of PyTorch's OpenMP threads."""

import os

WAIT_POLICY = "OMP_WAIT_POLICY"


def let_waiting_threads_sleep() -> None:
    """Sets OMP_WAIT_POLICY=passive for this process and its children, unless the user set it.

    OpenMP's threads spin while they wait for each other. A spinning thread occupies a core that
    another program needs: two programs that spin slow each other down by more than ten times. The
    OpenMP runtime reads the variable when PyTorch loads it: the call has no effect after PyTorch
    was imported.
    """
    os.environ.setdefault(WAIT_POLICY, "passive")
