"""Budgets as users write them, and the slots that they buy."""

import re
from collections.abc import Sequence

from runtime.errors import BudgetError

UNITS = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


def parse_budget(budget: str | int, *, total_bytes: int) -> int:
    """Bytes for the arena. A percentage is a share of all experts' bytes (`total_bytes`).

    Raises:
        BudgetError: not a size and not a percentage.
    """
    if isinstance(budget, int):
        return budget
    text = budget.strip()
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    if share:
        # Rounded up, so that 100 % holds every expert whatever the division leaves.
        return -(-int(float(share[1]) * total_bytes) // 100)
    size = _bytes(text)
    if size is None:
        raise BudgetError(
            f"budget={budget!r}: write a size such as 4GiB or 512MiB, or a share such as 50%"
        )
    return size


def parse_size(text: str, *, name: str) -> int:
    """Bytes of a size; `name` is the option, for the error.

    Raises:
        BudgetError: not a size.
    """
    size = _bytes(text.strip())
    if size is None:
        raise BudgetError(f"{name}={text!r}: write a size such as 8MiB or 2GiB")
    return size


def _bytes(text: str) -> int | None:
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if size is None or size[2].upper() not in UNITS:
        return None
    return int(float(size[1]) * UNITS[size[2].upper()])


def spread_slots(
    budget_bytes: int,
    *,
    slot_bytes: int,
    scratch_bytes: int,
    top_k: int,
    owned: Sequence[int],
    name: str = "budget",
) -> list[int]:
    """Slots of each of several devices that own so many experts: the budget in proportion.

    A step may need all its experts from one device, so each has `top_k` slots at least.

    Raises:
        BudgetError: less than that, with that least budget in bytes.
    """
    total = sum(owned)
    least = -(-top_k * slot_bytes * total // min(owned)) + scratch_bytes
    if budget_bytes < least:
        raise BudgetError(
            f"{name} of {budget_bytes} bytes is too small for {len(owned)} devices: each needs "
            f"{top_k} experts of {slot_bytes} bytes; the least budget is {least} bytes "
            f"({name}={least})"
        )
    room = budget_bytes - scratch_bytes
    return [min(own, room * own // (total * slot_bytes)) for own in owned]


def slots_of(
    budget_bytes: int,
    *,
    slot_bytes: int,
    scratch_bytes: int,
    top_k: int,
    num_experts: int,
    name: str = "budget",
) -> int:
    """Slots that fit beside the scratch buffer, at most one for each expert of the model.

    Raises:
        BudgetError: less than one layer of one token needs, with that least budget in bytes.
    """
    least = top_k * slot_bytes + scratch_bytes
    if budget_bytes < least:
        raise BudgetError(
            f"{name} of {budget_bytes} bytes is too small: one step needs {top_k} experts of "
            f"{slot_bytes} bytes"
            + (f" and {scratch_bytes} bytes to convert them" if scratch_bytes else "")
            + f"; the least budget is {least} bytes ({name}={least})"
        )
    return min(num_experts, (budget_bytes - scratch_bytes) // slot_bytes)
