"""Several publishers of one zoo: the second one reads the index again."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from zoo.errors import ConflictError

Result = TypeVar("Result")

ATTEMPTS = 20
"""Each conflict is another publisher's success, so that only a crowd comes to the last one."""
LONGEST_PAUSE_SECONDS = 2.0


def retry_conflicts(change: Callable[[], Result]) -> Result:
    """Calls a function that reads the index and publishes a changed one until it succeeds.

    Pauses are random and grow, so that publishers that met once do not meet again. Raises the
    ConflictError of the last attempt.
    """
    for attempt in range(ATTEMPTS - 1):
        try:
            return change()
        except ConflictError:
            time.sleep(random.uniform(0, min(0.05 * 2**attempt, LONGEST_PAUSE_SECONDS)))
    return change()
