"""Writes the catalogue of the built-in zoo from its index and manifests."""

from collections.abc import Mapping
from typing import Any

from zoo.catalog import Zoo
from zoo.index import EntryReference
from zoo.storage import builtin_storage

SCORES = ("accuracy", "fetch_rate", "good_pred")
CACHE_SHARES = (10, 25, 50, 75)


def render_catalogue() -> str:
    """Returns a row for each entry, and the hit rates of those that are for eviction."""
    zoo = Zoo(builtin_storage())
    index = zoo.read_index(required=True)
    lines = [
        "| entry | licence | Accuracy | FetchRate | GoodPred | size | digest begins |",
        "|---|---|---|---|---|---|---|",
    ]
    rates = []
    for name, record in sorted(index.entries.items()):
        manifest = zoo.open(EntryReference(name), index).manifest
        scores = [write_score(manifest.metrics, key) for key in SCORES]
        size = f"{record.versions[record.latest].size / 1024:,.0f} KiB"
        cells = (f"`{name}`", manifest.licence, *scores, size, f"`{record.latest[:12]}`")
        lines.append(f"| {' | '.join(cells)} |")
        if "hit_rate_50" in manifest.metrics:
            hits = [write_score(manifest.metrics, f"hit_rate_{share}") for share in CACHE_SHARES]
            rates.append(f"| `{name}` | {' | '.join(hits)} |")
    shares = " | ".join(f"{share} %" for share in CACHE_SHARES)
    lines += [
        "",
        "Predictors of reuse, which decide what to evict: hit rate on held-out prompts of their "
        "own trace, by share of the experts that fit in the cache, with nothing prefetched.",
    ]
    lines += ["", f"| entry | {shares} |", "|---|---|---|---|---|", *rates]
    return "\n".join(lines) + "\n"


def write_score(metrics: Mapping[str, Any], key: str) -> str:
    value = metrics.get(key)
    return "-" if value is None else f"{value:.3f}"
