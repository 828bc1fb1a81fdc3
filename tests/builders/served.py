"""Served models whose links are ours: to delay, reorder, hang and kill transfers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

import runtime
from runtime.config import Exact, ModelConfig
from runtime.engine import assembly as assemble
from runtime.engine.engine import Engine
from runtime.policy.tier import TransferTask
from runtime.transfer.link import Link

WAIT_SECONDS = 240.0


def serve(folder: Path, *, exact: Exact = Exact.AUTO, **kwargs) -> PreTrainedModel:
    """`runtime.load` of a local folder on the CPU."""
    config = ModelConfig(name="tiny", id=str(folder), exact=exact)
    return runtime.load(config, **{"device": "cpu", **kwargs})


@contextmanager
def between_transfers(engine: Engine) -> Iterator[None]:
    """Holds the engine's lock at a moment at which nothing is in flight.

    Prefetches go on after a generation has ended: what is read in the block is of one moment.
    """
    with engine._condition:
        assert engine._condition.wait_for(
            lambda: all(worker.is_idle for worker in engine.workers), WAIT_SECONDS
        )
        yield


def count_pins(engine: Engine) -> int:
    """Counts the pins of all tiers at a moment at which nothing is in flight."""
    with between_transfers(engine):
        entries = [e for tier in engine.cache.tiers for e in tier.cache.entries.values()]
        return sum(entry.pins for entry in entries)


def before_transfers(call: Callable[[TransferTask], object]) -> Callable[[str, Link], Link]:
    """What `serve_with_links` wraps links in to call this function before each transfer."""

    def wrap(_name: str, link: Link) -> Link:
        transfer = link.transfer

        def transfer_after_call(task: TransferTask) -> None:
            call(task)
            transfer(task)

        link.transfer = transfer_after_call
        return link

    return wrap


def serve_with_links(
    folder: Path, monkeypatch, wrap: Callable[[str, Link], Link], **kwargs
) -> PreTrainedModel:
    """The same, each link replaced by what `wrap(name, link)` makes of it."""
    connect = assemble.connect

    def connected(store, spec, devices, options):
        (device,) = devices
        names = ["copy", "disk"][-len(device.links) :]
        wrapped = [wrap(name, link) for name, link in zip(names, device.links, strict=True)]
        return connect(store, spec, [replace(device, links=wrapped)], options)

    monkeypatch.setattr(assemble, "connect", connected)
    return serve(folder, **kwargs)
