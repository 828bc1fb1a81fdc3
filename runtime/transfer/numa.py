"""Memory and threads near a device, on machines with several NUMA nodes.

MoE-Infinity (sequence level) gives each node a memory pool (section 7) and measures a speedup of
1.4 (section 8.6).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from runtime.accelerator import find_numa_node, is_accelerator

NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")


def find_near_cpus(
    device: torch.device, number: int, *, nodes: Path = NODES
) -> frozenset[int] | None:
    """Processors of the device's node; None where there is one node, or none is known.

    CPU "devices", which are nowhere in particular, take the nodes in turn: `number` is the
    device's.
    """
    cpus_by_node = {node: cpus for node, cpus in _nodes(nodes).items() if cpus}
    if len(cpus_by_node) < 2:
        return None
    if is_accelerator(device):
        node = find_numa_node(device, PCI)
        return None if node is None else cpus_by_node.get(node)
    return cpus_by_node[sorted(cpus_by_node)[number % len(cpus_by_node)]]


def _nodes(folder: Path) -> dict[int, frozenset[int]]:
    """Node to those of its processors that this process may use."""
    if not folder.is_dir() or not hasattr(os, "sched_getaffinity"):
        return {}
    usable = os.sched_getaffinity(0)
    return {
        int(node.name.removeprefix("node")): parse_cpu_list((node / "cpulist").read_text()) & usable
        for node in folder.glob("node[0-9]*")
    }


def parse_cpu_list(cpulist: str) -> frozenset[int]:
    """The kernel's notation: `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, cpulist.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


@contextmanager
def run_near(cpus: frozenset[int] | None) -> Iterator[None]:
    """Run this thread on the given processors within the context.

    Pages that it touches first, or pins, are allocated on their node.
    """
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
