"""Memory budgets as users write them, and the slots that they hold."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from predictors.spec import ModelSpec
from predictors.units import GIB, KIB, MIB
from runtime.errors import BudgetError

UNITS = {
    "": 1,
    "B": 1,
    **dict.fromkeys(("K", "KIB"), KIB),
    **dict.fromkeys(("M", "MIB"), MIB),
    **dict.fromkeys(("G", "GIB"), GIB),
    **dict.fromkeys(("T", "TIB"), 1024 * GIB),
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
"""Units by their upper-case names. `8G` is 8 GiB, as it is to Docker, systemd and Slurm."""
FORMS = "a size such as 4GiB or 1TiB, a share such as 50%, or a fraction such as 0.5"
"""Forms of a budget, for error messages."""

SlotCounts = Mapping[int, int]
"""Numbers of slots by their size in bytes."""


@dataclass(frozen=True)
class Budget:
    """Memory for experts: a number of bytes, or a share of all experts' bytes."""

    num_bytes: int | None = None
    percent: float | None = None
    option: str = field(default="budget", compare=False)
    """Option that it was given as, for error messages."""

    def __post_init__(self) -> None:
        assert (self.num_bytes is None) != (self.percent is None), self

    @classmethod
    def parse(cls, value: "Budget | str | float", *, option: str = "budget") -> "Budget":
        """Read a size (`4GiB`), a share (`50%`), a fraction (`0.5`) or a whole number of bytes.

        Raises:
            BudgetError: none of these.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(num_bytes=value, option=option)
        text = str(value).strip()
        if share := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%|(\d*\.\d+(?:e-\d+)?|\d+e-\d+)", text):
            percent = float(share[1]) if share[1] else 100 * float(share[2])
            if not 0 < percent <= 100:
                raise BudgetError(
                    f"{option}={value}: a share of all experts must be above 0 and at most 1 or "
                    f"100%; or write {FORMS}"
                )
            return cls(percent=percent, option=option)
        size = _parse_bytes(text)
        if size is None or not isinstance(value, str):
            raise BudgetError(f"{option}={value!r}: write {FORMS}")
        return cls(num_bytes=size, option=option)

    def resolve(self, *, total_bytes: int) -> int:
        """Return the bytes of the budget, where all experts take `total_bytes`."""
        if self.num_bytes is not None:
            return self.num_bytes
        assert self.percent is not None
        # Rounded up, so that 100 % holds every expert whatever remainder the division leaves.
        return -(-int(self.percent * total_bytes) // 100)


def parse_size(text: str, *, name: str) -> int:
    """Return the bytes of a size; `name` is the option, for the error.

    Raises:
        BudgetError: not a size.
    """
    size = _parse_bytes(text.strip())
    if size is None:
        raise BudgetError(f"{name}={text!r}: write a size such as 8MiB or 2GiB")
    return size


def _parse_bytes(text: str) -> int | None:
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if size is None or size[2].upper() not in UNITS:
        return None
    return int(float(size[1]) * UNITS[size[2].upper()])


@dataclass(frozen=True, kw_only=True)
class SlotRequirements:
    """Sizes that decide how many slots a budget holds."""

    experts: SlotCounts
    """Experts of all layers together, by the size of the slot that they need."""
    top_k: int
    """Experts that one step needs at the same time."""
    scratch_bytes: int = 0
    """Buffer for conversions, taken from the budget once."""

    @classmethod
    def of(cls, spec: ModelSpec, *, slot_bytes: int) -> Self:
        """Return the requirements of a model whose experts are all of one size."""
        return cls(experts={slot_bytes: spec.num_layers * spec.num_experts}, top_k=spec.top_k)

    @property
    def num_experts(self) -> int:
        return sum(self.experts.values())

    @property
    def slot_bytes(self) -> int:
        """The largest slot."""
        return max(self.experts)

    @property
    def total_bytes(self) -> int:
        """Memory for every expert: 100 % includes the conversion buffer."""
        return count_bytes(self.experts) + self.scratch_bytes

    @property
    def least_bytes(self) -> int:
        """Memory for the experts of one token in one layer, whichever it is."""
        return self.top_k * self.slot_bytes + self.scratch_bytes


def count_slots(budget: Budget, needs: SlotRequirements) -> int:
    """Return the slots that the budget holds, at most one for each expert of the model.

    Raises:
        BudgetError: less than one layer of one token needs, with that least budget in bytes.
    """
    (slots,) = divide_slots(budget, needs, [needs.experts])
    return sum(slots.values())


def divide_slots(
    budget: Budget, needs: SlotRequirements, owned: Sequence[SlotCounts]
) -> list[SlotCounts]:
    """Return the slots of each of several devices, in proportion to the experts that each owns.

    One device may own all experts that a step needs, so each gets `top_k` slots at least.

    Raises:
        BudgetError: less than that, with that least budget in bytes.
    """
    num_bytes = budget.resolve(total_bytes=needs.total_bytes)
    sizes = [count_bytes(experts) for experts in owned]
    total = sum(sizes)
    least = needs.scratch_bytes + max(
        -(-needs.top_k * max(experts) * total // size)
        for experts, size in zip(owned, sizes, strict=True)
    )
    if num_bytes < least:
        devices = "" if len(owned) == 1 else f" for {len(owned)} devices"
        converted = f" and {needs.scratch_bytes} bytes to convert them"
        raise BudgetError(
            f"{budget.option} of {num_bytes} bytes is too small{devices}: "
            f"{'each' if devices else 'one step'} needs {needs.top_k} experts of "
            f"{needs.slot_bytes} bytes{converted if needs.scratch_bytes else ''}; the least budget "
            f"is {least} bytes ({budget.option}={least})"
        )
    available = num_bytes - needs.scratch_bytes
    return [
        _share_slots(available * size // total, experts, needs.top_k)
        for size, experts in zip(sizes, owned, strict=True)
    ]


def _share_slots(num_bytes: int, experts: SlotCounts, top_k: int) -> SlotCounts:
    """Return slots for as large a share of the experts of each size as of all.

    The largest hold any expert, so there are `top_k` slots for those of each size.
    """
    slots: dict[int, int] = {}
    left = count_bytes(experts)
    for size in sorted(experts, reverse=True):
        share = num_bytes * experts[size] // left
        slots[size] = min(experts[size], max(share, top_k - sum(slots.values())))
        num_bytes -= size * slots[size]
        left -= size * experts[size]
    return slots


def count_bytes(counts: SlotCounts) -> int:
    return sum(size * count for size, count in counts.items())
