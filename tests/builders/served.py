"""Served models whose links are ours: to delay, reorder, hang and kill transfers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

import runtime
from runtime.config import Exact, ModelConfig
from runtime.engine import assembly as assemble
from runtime.transfer.link import Link


def serve(folder: Path, *, exact: Exact = Exact.AUTO, **kwargs) -> PreTrainedModel:
    """`runtime.load` of a local folder on the CPU."""
    config = ModelConfig(name="tiny", id=str(folder), exact=exact)
    return runtime.load(config, **{"device": "cpu", **kwargs})


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
