"""`budget=auto`: memory for experts, from the free memory and what else a model takes of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from predictors.units import GIB, MIB
from runtime.accelerator import is_accelerator, read_free_memory
from runtime.engine.memory import available_memory_bytes
from runtime.errors import BudgetError
from runtime.policy.budget import Budget, SlotRequirements

PROCESS_BYTES = 300 * MIB
"""Most bytes of a process without weights, arena and KV caches (`verify` measures it)."""
USABLE_MEMORY_SHARE = 0.9
"""Share of free memory that is used; the rest is left to other programs and long prompts."""


@dataclass(frozen=True, kw_only=True)
class FreeMemory:
    """Free memory before a model is loaded, and what the model takes besides experts; in bytes."""

    devices: Sequence[torch.device] = (torch.device("cpu"),)
    """Devices that compute experts; the other weights and the KV caches are on the first."""
    available: Sequence[int]
    """Free memory of each device."""
    weights: int
    """Weights that are not experts."""
    kv_caches: int = 0
    process: int = PROCESS_BYTES
    """Libraries and activations."""
    host_tier: int = 0
    """A second tier below `budget`, where both are on the CPU."""
    draft: int = 0
    """A draft model, as far as `available` is without it."""

    @property
    def besides(self) -> int:
        """Memory on the first device that is not for experts."""
        return self.weights + self.kv_caches + self.process + self.host_tier + self.draft

    @property
    def room(self) -> int:
        """Memory that experts may take, on all devices together; 0 or less: none.

        Experts are spread evenly, so the fullest device decides. Devices of one name share memory.
        """
        names = [str(device) for device in self.devices]
        rooms = []
        for name, available in zip(names, self.available, strict=True):
            besides = self.besides if name == names[0] else 0
            usable = int(USABLE_MEMORY_SHARE * available) - besides
            rooms.append(usable * len(names) // names.count(name))
        return min(rooms)


@dataclass(frozen=True, kw_only=True)
class AutoBudget:
    """A budget that was computed from free memory."""

    free: FreeMemory
    num_bytes: int
    total_bytes: int
    """Memory for all experts."""

    @property
    def holds_all(self) -> bool:
        return self.num_bytes == self.total_bytes

    @property
    def budget(self) -> Budget:
        return Budget(self.num_bytes)

    def describe(self) -> str:
        """Return a line with the budget and what it was computed from."""
        share = "all" if self.holds_all else f"{100 * self.num_bytes / self.total_bytes:.0f} %"
        return (
            f"budget=auto: {format_size(self.num_bytes)} for experts, {share} of them "
            f"({describe_memory(self.free)})"
        )


def choose_budget(needs: SlotRequirements, free: FreeMemory, *, share: float = 1.0) -> AutoBudget:
    """Return a budget for all experts if they fit, else for what free memory allows.

    Args:
        share: share of the room for experts that they get; of less than all of it, the rest is for
            KV caches.

    Raises:
        BudgetError: free memory does not hold the experts of one token in one layer.
    """
    num_bytes = min(needs.total_bytes, int(share * free.room))
    if num_bytes < needs.least_bytes:
        raise BudgetError(
            f"budget=auto: not enough free memory for this model: experts need at least "
            f"{format_size(needs.least_bytes)}, free memory leaves {format_size(max(0, num_bytes))}"
            f" ({describe_memory(free)}). Free memory, use a larger machine, or set a budget such "
            f"as budget={-(-needs.least_bytes // MIB)}MiB"
        )
    return AutoBudget(free=free, num_bytes=num_bytes, total_bytes=needs.total_bytes)


def measure_free_memory(devices: Sequence[torch.device], *, num_processes: int = 1) -> list[int]:
    """Return the free memory of each device, divided among `num_processes` on the CPU."""
    return [
        read_free_memory(device)
        if is_accelerator(device)
        else available_memory_bytes() // num_processes
        for device in devices
    ]


def describe_memory(free: FreeMemory) -> str:
    parts = {
        "other weights": free.weights,
        "KV caches": free.kv_caches,
        "the process": free.process,
        "host_budget": free.host_tier,
        "the draft model": free.draft,
    }
    listed = [f"{format_size(size)} for {name}" for name, size in parts.items() if size]
    available = " and ".join(map(format_size, free.available))
    unused = round(100 * (1 - USABLE_MEMORY_SHARE))
    return f"free: {available}, less {unused} %, {', '.join(listed)}"


def format_size(num_bytes: float) -> str:
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB // 10 else f"{num_bytes:.0f} bytes"
