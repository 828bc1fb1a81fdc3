"""Copies from host memory to a CUDA device, concurrent with the computation."""

import torch

from runtime.policy.tier import TransferTask
from runtime.transfer.arena import Arena
from runtime.transfer.link import copy_parts


class CudaLink:
    """Copies from a pinned arena to one on the device, on its own stream.

    Two orders must hold. A computation may read a slot only after its copy has ended: `transfer`
    returns when the copy's event has passed, and only then does the policy core count the chunk as
    arrived. A copy may overwrite a slot only after the last computation with it has ended, which
    the CPU has launched but not awaited: `computed` records an event on the computing stream, and
    the copy stream waits for that event before it writes.
    """

    def __init__(self, source: Arena, target: Arena, device: torch.device):
        self._source = source
        self._target = target
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._computed: dict[int, torch.cuda.Event] = {}
        # The arena may lie where earlier work of the computing stream, still under way, writes.
        torch.cuda.synchronize(device)

    def transfer(self, task: TransferTask) -> None:
        fence = self._computed.pop(task.slot, None) if task.first_chunk == 0 else None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            for target, source in copy_parts(task, self._source, self._target):
                target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        # Releases the GIL while it waits, so that the model's thread continues.
        done.synchronize()

    def computed(self, slot: int) -> None:
        event = self._computed.get(slot)
        if event is None:
            event = self._computed[slot] = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        self._stream.synchronize()
