"""Layers of a device whose experts are all there to stay: what routers choose stays there, too.

The host waits for nothing. The slots of a layer's experts are looked up on the device, and choices
are counted later, when they have come to the host next to the following steps.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from predictors.base import Ints
from runtime.accelerator import Accelerator, Event, send
from runtime.policy.device_cache import DeviceCache
from runtime.transfer.arena import MAX_GROUPS, SlotTable

MAX_UNCOUNTED = 64
"""Steps whose choices may be on their way to the host; for the oldest of more, it waits."""


class SentChoices(NamedTuple):
    """The choices of a step on their way to the host."""

    layers: list[int]
    choices: list[Tensor]
    arrived: Event


class ResidentExperts:
    """Looks up slots on the device and counts the choices of routers afterwards.

    Args:
        cache: of the device; `is_complete` whenever a choice is looked up.
        count: gets each layer's choices, in their order.
    """

    def __init__(
        self,
        cache: DeviceCache,
        device: torch.device,
        accelerator: Accelerator,
        count: Callable[[int, Ints], object],
    ):
        self._cache = cache
        self._count = count
        self._device = device
        self._accelerator = accelerator
        self._tables: dict[int, SlotTable] = {}
        self._step: list[tuple[int, Tensor]] = []
        self._sent: deque[SentChoices] = deque()
        self._lock = threading.Lock()  # statistics are asked for on any thread

    def look_up(self, layer: int, experts_TK: Tensor) -> SlotTable | None:
        """Return the slots of a layer's experts, to compute a choice that is counted later.

        None: they lie too far from each other for one launch.
        """
        table = self._tables.get(layer)
        if table is None:
            table = self._tables[layer] = self._make_table(layer)
        if len(table.slots) > MAX_GROUPS:
            return None
        self._step.append((layer, experts_TK))
        return table

    def _make_table(self, layer: int) -> SlotTable:
        entries = self._cache.top.cache.entries
        owned = {e: entry.slot for (owner, e), entry in entries.items() if owner == layer}
        slots = range(min(owned.values()), max(owned.values()) + 1)
        places_E = torch.tensor([owned[e] - slots.start for e in sorted(owned)])
        return SlotTable(send(places_E, self._device), slots)

    def forget(self) -> None:
        """Forget where experts are, and the choices of a step that was cut short."""
        self._tables.clear()
        self._step.clear()

    def end_step(self) -> None:
        """Send the step's choices to the host, and count those that have arrived."""
        if self._step:
            layers, chosen = zip(*self._step, strict=True)
            flat = torch.cat([choice.reshape(-1) for choice in chosen])
            copied = flat.to("cpu", non_blocking=self._accelerator.pins_memory)
            arrived = self._accelerator.make_event()
            arrived.record(self._accelerator.current_stream())
            parts = copied.split([choice.numel() for choice in chosen])
            shaped = [p.view(c.shape) for p, c in zip(parts, chosen, strict=True)]
            self._sent.append(SentChoices(list(layers), shaped, arrived))
            self._step.clear()
        self.count(MAX_UNCOUNTED)

    def count(self, num_left: int = 0) -> None:
        """Count what has arrived, after waiting until at most `num_left` steps have not."""
        with self._lock:
            while self._sent:
                if not self._sent[0].arrived.query():
                    if len(self._sent) <= num_left:
                        break
                    self._sent[0].arrived.synchronize()
                sent = self._sent.popleft()
                for layer, choice in zip(sent.layers, sent.choices, strict=True):
                    self._count(layer, choice.numpy())
