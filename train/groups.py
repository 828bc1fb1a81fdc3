"""Networks of a few layers as one task: which there are, and how one is trained by itself.

A network learns from its own loss alone, and one product of the stack is one network's. So a group
ends with the very weights that its networks have when all are trained together, as long as it
begins with the same weights, sees the same batches and is stopped after the same pass. The last is
known only when every group is done: each keeps the weights of every pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collect.traces import Trace
from collect.traces.column import Column
from predictors.registry import PLAIN
from predictors.spec import ModelSpec
from train.callbacks import EachPass
from train.data import TraceBatches, TraceData
from train.family import Family
from train.fit import FitSettings, quiet_lightning, trainer_for
from train.module import StackFit
from train.networks import Edge, PlainFamily, edges


@dataclass(frozen=True)
class Group:
    """`plain`: the networks of all plain kinds whose target is one of these layers.

    `residual`: the whole family, whose networks share the weights that make a token of the first
    layer's input.
    """

    kind: str
    first: int
    last: int
    """Of the target layers."""

    @property
    def name(self) -> str:
        return f"{self.kind}-layers-{self.first:02d}-{self.last:02d}"


def groups_of(spec: ModelSpec, kinds: Sequence[str], *, layers: int) -> list[Group]:
    """Every learned network of these kinds is in one of them."""
    found = []
    if "residual" in kinds:
        # The longest task first.
        found.append(Group("residual", 0, spec.num_layers - 1))
    plain = [kind for kind in PLAIN if kind in kinds]
    targets = {edge.target for edge in edges(spec, plain)} if plain else set()
    for first in range(0, spec.num_layers, layers):
        last = min(first + layers, spec.num_layers) - 1
        if targets & set(range(first, last + 1)):
            found.append(Group("plain", first, last))
    return found


class Window:
    """Some layers of a trace, numbered from 0: what is not needed is not read."""

    def __init__(self, trace: Trace, first: int, last: int):
        self._trace = trace
        self._first = first
        self.spec = replace(trace.spec, num_layers=last - first + 1)
        self.request_table = trace.request_table

    def column(self, signal: str, layer: int) -> Column:
        return self._trace.column(signal, self._first + layer)

    @property
    def requests(self) -> NDArray[np.int32]:
        return self._trace.requests

    def rows(self, split: str) -> NDArray[np.int64]:
        return self._trace.rows(split)


def train_group(
    group: Group,
    families: Sequence[Family],
    trace: Trace,
    settings: FitSettings,
    *,
    pool_rows: int,
    report: Callable[[int], None],
) -> dict[str, Any]:
    """The group's weights and accuracies after each pass, as a tree of tensors for a checkpoint.

    Args:
        group: which networks.
        families: as they are before training; this takes what is the group's.
        trace: what they learn from.
        settings: as for all networks together.
        pool_rows: of the run in which all are trained together, so that batches are the same.
        report: called with 1 after each pass.
    """
    quiet_lightning()
    family, view = own_part(group, families, trace, settings)
    data = TraceData(
        view,  # type: ignore[arg-type]
        batch_size=settings.batch_size,
        seed=settings.seed,
        needs=[family.needs],
        pool_rows=pool_rows,
    )
    first_pass: TraceBatches = data.batches(epoch=0)
    family.normalise_by(next(iter(first_pass)))
    module = StackFit(
        [family],
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        total_steps=settings.max_epochs * len(first_pass),
    )
    each = EachPass(report)
    trainer_for(settings, [each]).fit(module, data)
    return {
        "labels": own_labels(group, families),
        "steps_per_pass": len(first_pass),
        "passes": [
            {"accuracy": accuracy, "weights": weights}
            for accuracy, weights in zip(each.accuracies, each.weights, strict=True)
        ],
        "buffers": {
            name: value.cpu().clone()
            for name, value in module.cpu().named_buffers()
            if name.startswith("families.")
        },
    }


def family_of(group: Group, families: Sequence[Family]) -> Family:
    """The family to which the group's networks belong."""
    (found,) = (one for one in families if isinstance(one, PlainFamily) == (group.kind == "plain"))
    return found


def places_of(group: Group, family: Family) -> list[int]:
    """The group's networks in its family's stack."""
    if not isinstance(family, PlainFamily):
        return list(range(len(family.labels)))
    return [n for n, edge in enumerate(family.edges) if group.first <= edge.target <= group.last]


def own_labels(group: Group, families: Sequence[Family]) -> list[str]:
    family = family_of(group, families)
    return [family.labels[n] for n in places_of(group, family)]


def own_part(
    group: Group, families: Sequence[Family], trace: Trace, settings: FitSettings
) -> tuple[Family, Trace | Window]:
    """A family of the group's networks alone, and the layers of the trace that they read."""
    whole = family_of(group, families)
    if not isinstance(whole, PlainFamily):
        return whole, trace
    places = places_of(group, whole)
    own = [whole.edges[n] for n in places]
    first = min(edge.source for edge in own)
    window = Window(trace, first, max(edge.target for edge in own))
    shifted = [Edge(edge.kind, edge.source - first, edge.target - first) for edge in own]
    part = PlainFamily(window.spec, shifted, width=settings.width, loss=settings.loss)
    with torch.no_grad():
        for name, value in part.stack.named_parameters():
            value.copy_(whole.stack.get_parameter(name)[places])
    return part, window


@torch.no_grad()
def put_back(
    group: Group, families: Sequence[Family], weights: dict[str, Tensor], buffers: dict[str, Tensor]
) -> None:
    """Gives the whole family what the group has learned; names are those of `StackFit`."""
    whole = family_of(group, families)
    places = places_of(group, whole)
    is_part = isinstance(whole, PlainFamily)
    for name, value in {**weights, **buffers}.items():
        own = name.removeprefix("families.0.")
        target = dict(whole.named_parameters()).get(own)
        if target is None:
            target = whole.get_buffer(own)
        if is_part:
            target[places] = value
        else:
            target.copy_(value)
