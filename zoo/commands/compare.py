"""The command compare: two entries next to each other."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from predictors.table import Table, format_or_dash
from zoo.commands import print_line, summarize
from zoo.comparison import (
    MetricPair,
    describe_traces,
    pair_costs,
    pair_layers,
    pair_metrics,
    require_same_model,
)
from zoo.config import CompareConfig
from zoo.entry import ZooEntry
from zoo.load import find_entry


def compare(config: CompareConfig) -> dict[str, Any]:
    """Prints metrics, costs and layers of two entries of one model, and returns them."""
    first, second = find_entry(config.name), find_entry(config.other)
    require_same_model(first, second)
    sections = {
        "held out": pair_metrics(first, second),
        "costs": pair_costs(first, second),
        "accuracy by layer": pair_layers(first, second),
    }
    note = describe_traces(first, second)
    compared = {
        "entries": [asdict(summarize(entry)) for entry in (first, second)],
        "same_trace": note is None,
        **{
            name.replace(" ", "_"): {
                pair.name: [pair.first, pair.second, pair.difference] for pair in pairs
            }
            for name, pairs in sections.items()
        },
    }
    if config.json:
        print_line(json.dumps(compared, indent=2))
        return compared
    print_line(f"A: {describe_version(first)}")
    print_line(f"B: {describe_version(second)}\n")
    for name, pairs in sections.items():
        if pairs:
            comparison_table(name, pairs).print(Console())
    if note is not None:
        print_line(note)
    return compared


def describe_version(entry: ZooEntry) -> str:
    manifest = entry.manifest
    return f"{manifest.name}@{manifest.digest[:12]}, made {manifest.created}, in {entry.where}"


def comparison_table(title: str, pairs: Sequence[MetricPair]) -> Table:
    def signed(pair: MetricPair) -> str:
        difference = pair.difference
        if difference is None:
            return ""
        return f"{difference:+d}" if isinstance(difference, int) else f"{difference:+.4g}"

    return Table.of(
        [title, "A", "B", "B - A"],
        [
            [
                pair.name.replace("_", " "),
                format_or_dash(pair.first),
                format_or_dash(pair.second),
                signed(pair),
            ]
            for pair in pairs
        ],
        elsewhere="json=true prints them",
    )
