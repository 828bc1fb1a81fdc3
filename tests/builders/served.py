"""Served models whose transfers are ours: to delay, reorder, hang and kill."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

import runtime
from runtime.config import Exact, ModelConfig
from runtime.engine import assembly as assemble
from runtime.engine.engine import Engine
from runtime.errors import BudgetError
from runtime.policy.tier import TransferTask
from runtime.transfer.file_ring import StoreRing
from runtime.transfer.ring import Arrivals, Ring
from runtime.transfer.thread_ring import ThreadRing

Transfer = Callable[[TransferTask], None]


def serve(folder: Path, *, exact: Exact = Exact.AUTO, **kwargs) -> PreTrainedModel:
    """`runtime.load` of a local folder on the CPU."""
    config = ModelConfig(name="tiny", id=str(folder), exact=exact)
    return runtime.load(config, **{"device": "cpu", **kwargs})


@contextmanager
def serving(folder: Path, **options) -> Iterator[PreTrainedModel]:
    """The model of `serve`, which is closed at the end of the block."""
    model = serve(folder, **options)
    with model.moecast:
        yield model


@torch.no_grad()
def serve_logits(folder: Path, tokens: Tensor, **options) -> Tensor:
    """The logits of the tokens by a model that is served with these options."""
    with serving(folder, **options) as model:
        return model(tokens).logits


def serve_few(folder: Path, *, host_budget: str | None = None, **options) -> PreTrainedModel:
    """Serves a quarter of the experts, or the least that one token needs, in one tier."""
    try:
        return serve(folder, budget="25%", host_budget=host_budget, **options)
    except BudgetError as error:
        least = re.search(r"budget=(\d+)", str(error))
        assert least is not None
        return serve(folder, budget=int(least[1]), **options)


def settle(engine: Engine) -> None:
    """Waits until nothing is in flight: prefetches go on after a generation has ended."""
    engine.loop.pump(is_idle=True)
    while engine.loop.is_moving:
        engine.loop.wait()
        engine.loop.pump(is_idle=True)


def count_pins(engine: Engine) -> int:
    """Counts the pins of all tiers when nothing is in flight."""
    settle(engine)
    entries = [e for tier in engine.cache.tiers for e in tier.cache.entries.values()]
    return sum(entry.pins for entry in entries)


def read_in_python(engine: Engine) -> None:
    """Has the store's own `read` called for every expert, as for those that are converted."""
    settle(engine)
    for link in engine.loop.links:
        if isinstance(link.ring, StoreRing):
            link.ring._compiled = None


def before_transfers(call: Callable[[TransferTask], object]) -> Callable[[str, Transfer], Transfer]:
    """What `serve_with_transfers` wraps transfers in to call this function before each."""

    def wrap(_name: str, transfer: Transfer) -> Transfer:
        def transfer_after_call(task: TransferTask) -> None:
            call(task)
            transfer(task)

        return transfer_after_call

    return wrap


def serve_with_transfers(
    folder: Path, monkeypatch, wrap: Callable[[str, Transfer], Transfer], **kwargs
) -> PreTrainedModel:
    """The same, the transfers of each link being what `wrap(name, transfer)` makes of them.

    They run on threads in Python. Where the result has a method `computed`, it gets the slots whose
    experts have been computed.
    """

    def wrapped(name: str, arrivals: Arrivals, ring: Ring) -> Ring:
        transfer = wrap(name, ring.transfer)
        threads = ThreadRing(arrivals, transfer, name=name)
        threads.computed = getattr(transfer, "computed", threads.computed)
        threads.close = lambda seconds: ThreadRing.close(threads, seconds) and ring.close(seconds)
        return threads

    return serve_with_rings(folder, monkeypatch, wrapped, **kwargs)


def serve_with_rings(
    folder: Path, monkeypatch, make: Callable[[str, Arrivals, Ring], Ring], **kwargs
) -> PreTrainedModel:
    """The same, each ring replaced by what `make(name, arrivals, ring)` returns."""
    connect = assemble.connect

    def connected(store, spec, devices, arrivals, options):
        (tiers,) = devices
        named = zip(["copy", "disk"][-len(tiers) :], tiers, strict=True)
        made = [(arena, make(name, arrivals, ring)) for name, (arena, ring) in named]
        return connect(store, spec, [made], arrivals, options)

    monkeypatch.setattr(assemble, "connect", connected)
    return serve(folder, **kwargs)
