"""The command promote: moves an alias to another version unless its metrics are worse."""

from dataclasses import asdict
from typing import Any

from predictors.table import format_or_dash
from zoo.commands import print_line, summarize
from zoo.commands.publish import open_writable_zoo
from zoo.comparison import describe_traces, pair_metrics, require_same_model
from zoo.config import PromoteConfig
from zoo.entry import ZooEntry
from zoo.errors import RefusedError
from zoo.index import check_alias, parse_reference


def promote(config: PromoteConfig) -> dict[str, Any]:
    """Makes an alias name a version; RefusedError, with the figures, if a metric falls too far."""
    reference, alias = parse_reference(config.name), check_alias(config.alias)
    zoo = open_writable_zoo(config.zoo, key=config.key)

    def check(entry: ZooEntry, now: ZooEntry | None) -> None:
        entry.verify()
        if now is not None:
            check_metrics(entry, now, config)

    move = zoo.move_alias(reference, alias, check=check)
    manifest = move.entry.manifest
    before = "" if move.earlier is None else f", before {move.earlier.manifest.digest[:12]}"
    print_line(
        f"{reference.name}@{alias} is {manifest.digest[:12]} in {zoo.storage.address}{before}"
    )
    if move.earlier is not None and (note := describe_traces(move.earlier, move.entry)):
        print_line(note)
    return {
        "alias": alias,
        "promoted": asdict(summarize(move.entry)),
        "before": None if move.earlier is None else asdict(summarize(move.earlier)),
        "in": zoo.storage.address,
    }


def check_metrics(entry: ZooEntry, now: ZooEntry, config: PromoteConfig) -> None:
    """Raises RefusedError that lists the metrics which are lower by more than `max_drop`."""
    require_same_model(now, entry)
    fallen = [
        f"{pair.name} {format_or_dash(pair.second)}, was {format_or_dash(pair.first)}"
        for pair in pair_metrics(now, entry)
        if pair.has_fallen(config.max_drop)
    ]
    if fallen:
        versions = [f"{one.manifest.name}@{one.manifest.digest[:12]}" for one in (now, entry)]
        listed = " ".join(locate_version(version, config.zoo) for version in versions)
        raise RefusedError(
            f"{versions[1]} does not become {config.alias}, which is {versions[0]}: lower by more "
            f"than max_drop={config.max_drop:g}: {'; '.join(fallen)}. All figures: moecast zoo "
            f"compare {listed}"
        )


def locate_version(version: str, zoo: str | None) -> str:
    """Returns the reference by which any command finds a version of the zoo."""
    if zoo is None or zoo == "builtin":
        return version
    return f"{zoo}#{version}" if "://" in zoo else f"file://{zoo}#{version}"
