"""Who is first in each cell of the table, how far ours is from it, and what share of the bound."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

PLACE = ("hardware", "budget", "batch")
"""What systems are compared within."""

CLOSE = 0.02
"""Nearer to the first than this counts as close: ours is to be close in every cell."""


def cells_of(rows: Sequence[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Rows by place, then by system, in the order in which they stand."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in PLACE), {})[row["system"]] = row
    return found


def compared(rows: Sequence[Row], *, baseline: str, bound: str) -> list[dict[str, Any]]:
    """Each row with its speed-ups against the baseline of its cell, and its share of the bound:
    above 1, a system beats what was meant as a bound.
    """
    cells = cells_of(rows)
    return [
        {
            **row,
            "speedup_decode": ratio(here, baseline, row, "tpot_ms"),
            "speedup_prefill": ratio(here, baseline, row, "ttft_ms"),
            "share_of_bound": ratio(here, bound, row, "tpot_ms"),
        }
        for row in rows
        for here in [cells[tuple(row[key] for key in PLACE)]]
    ]


def ratio(here: Mapping[str, Row], other: str, row: Row, key: str) -> float | None:
    """How many times as long the other takes; None where one of them was not measured."""
    if other not in here or not row[key] or not here[other][key]:
        return None
    return here[other][key] / row[key]


def winners(rows: Sequence[Row], *, ours: str, bound: str) -> list[dict[str, Any]]:
    """For each cell: the first two systems by the median time of a token, the bound left out, and
    ours: its rank, how much slower it is than the first (negative: it is first, and the second
    so much slower), and its share of the bound.
    """
    found = []
    for place, here in cells_of(rows).items():
        times = {
            name: row["tpot_ms"] for name, row in here.items() if name != bound and row["tpot_ms"]
        }
        order = sorted(times, key=times.__getitem__)
        if not order:
            continue
        first, second = order[0], order[1] if len(order) > 1 else None
        limit = here[bound]["tpot_ms"] if bound in here else None
        found.append(
            {
                **dict(zip(PLACE, place, strict=True)),
                "first": first,
                "first_tpot_ms": times[first],
                "second": second,
                "second_tpot_ms": None if second is None else times[second],
                "bound_tpot_ms": limit,
                **standing(times, order, ours, limit),
            }
        )
    return found


def standing(
    times: Mapping[str, float], order: Sequence[str], ours: str, limit: float | None
) -> dict[str, Any]:
    """Our place in one cell; nulls where we are not in it."""
    if ours not in times:
        return dict.fromkeys(("ours_tpot_ms", "rank", "behind_first", "close", "share_of_bound"))
    mine, rank = times[ours], order.index(ours) + 1
    rival = times[order[1]] if rank == 1 and len(order) > 1 else times[order[0]]
    behind = mine / rival - 1
    return {
        "ours_tpot_ms": mine,
        "rank": rank,
        "behind_first": behind,
        "close": rank == 1 or behind <= CLOSE,
        "share_of_bound": None if limit is None else limit / mine,
    }


def tally(places: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """In how many cells ours is first or close to it, and the worst of each figure."""
    counted = [one for one in places if one["rank"] is not None]
    shares = [one["share_of_bound"] for one in counted if one["share_of_bound"] is not None]
    return {
        "cells": len(counted),
        "first": sum(one["rank"] == 1 for one in counted),
        "close": sum(one["close"] for one in counted),
        "worst_behind_first": max((one["behind_first"] for one in counted), default=None),
        "worst_share_of_bound": min(shares, default=None),
    }
