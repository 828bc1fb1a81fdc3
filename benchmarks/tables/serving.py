"""The server: what it withstands, who speaks with it, and latency under a trace's arrivals."""

from typing import Any

from benchmarks.tables.markdown import figure, percent, result, table
from predictors.units import MIB


def withstood() -> list[str]:
    """One row for each benchmark that was run."""
    found = result("serving") or {}
    rows = [ROWS[name](found[name]) for name in ROWS if name in found]
    if not rows:
        return []
    return [
        "The server as a process of its own, the reference model, clients on the same machine:",
        "",
        *table(["what", "to reach", "measured"], rows),
        "",
    ]


def storm(one: dict[str, Any]) -> list[str]:
    return [
        f"{one['requests']} requests for {one['tokens']:,} tokens each, their clients gone after "
        f"{one['client_seconds']:g} s; then one for 10 tokens",
        "answered within 5 s; nothing runs, waits or is pinned",
        f"{one['next_seconds_worst']:.2f} s at worst of {len(one['runs'])}; "
        f"{left(*(run['left'] for run in one['runs']))}",
    ]


def shutdown(one: dict[str, Any]) -> list[str]:
    return [
        f"SIGTERM while {one['requests']} answers are made",
        "gone within 4.1 s without grace; with it all accepted ones completed, none new, no child",
        f"{one['seconds_worst_without_grace']:.2f} s at worst; {one['completed']} of "
        f"{one['accepted']} completed, {one['late_accepted']} new, {one['children_left']} children",
    ]


def queue(one: dict[str, Any]) -> list[str]:
    alone, together = one["one_after_another"], one["8_at_a_time"]
    return [
        f"{alone['requests'] + together['requests']} requests to a full queue",
        "429 and Retry-After within 50 ms",
        f"p99 {alone['p99_ms']:.1f} ms one after another, {together['p99_ms']:.1f} ms eight at a "
        f"time; {alone['statuses'].get('429', 0) + together['statuses'].get('429', 0)} times 429",
    ]


def fuzz(one: dict[str, Any]) -> list[str]:
    failed = sum(count for status, count in one["statuses"].items() if status.startswith("5"))
    return [
        f"{one['cases']:,} requests made by schemathesis, or damaged",
        "no status 500; refusals in OpenAI's shape",
        f"{failed} of 500 or above, {len(one['wrong'])} wrong in all",
    ]


def disconnects(one: dict[str, Any]) -> list[str]:
    grown = (one["after"]["rss_bytes"] - one["before"]["rss_bytes"]) / MIB
    return [
        f"{one['requests']:,} clients that leave at random moments",
        "no slot, thread or descriptor stays",
        f"{left(one['left'])}; threads {one['threads_leaked']:+d}, descriptors "
        f"{one['descriptors_leaked']:+d}, memory {grown:+.0f} MiB",
    ]


def soak(one: dict[str, Any]) -> list[str]:
    idle = [look["anonymous_bytes"] / MIB for look in one["idle"]]
    slope = one["anonymous_slope"]["bytes_per_hour"]
    return [
        f"{one['minutes']:g} minutes of mixed load, {sum(one['counts'].values())} requests",
        "memory flat, no thread or descriptor stays",
        f"memory (no file's pages) when nothing is generated, at a quarter, half and the end: "
        f"{idle[len(idle) // 4]:.0f}, {idle[len(idle) // 2]:.0f}, {idle[-1]:.0f} MiB; over the "
        f"second half {figure(None if slope is None else slope / MIB, 1, ' MiB an hour')}; "
        f"threads {one['threads_leaked']:+d}, descriptors {one['descriptors_leaked']:+d}",
    ]


def clients(one: dict[str, Any]) -> list[str]:
    said = {True: "works", False: "fails", None: "not run"}
    every = one["clients"].items()
    return [
        "other programs, unmodified: " + ", ".join(f"{k} {v.get('version', '')}" for k, v in every),
        "work",
        ", ".join(f"{name} {said[client['works']]}" for name, client in every),
    ]


ROWS = {
    "storm": storm,
    "shutdown": shutdown,
    "queue": queue,
    "fuzz": fuzz,
    "disconnects": disconnects,
    "soak": soak,
    "clients": clients,
}


def left(*found: dict[str, float]) -> str:
    """What still ran, waited or was pinned afterwards."""
    total = sum(sum(one.values()) for one in found)
    return "nothing is left" if not total else f"{total:g} left"


def arrivals() -> list[str]:
    """Latency by system."""
    found = (result("serving") or {}).get("arrivals")
    if found is None:
        return []
    parts = {"end to end": "e2e_seconds", "first token": "ttft_seconds", "token": "tpot_seconds"}
    rows = [
        [f"`{name}`", ", ".join(figure(mean, 2) for mean in one["mean_of_each_repetition"])]
        + [figure(one[key][at], 2) for key in parts.values() for at in ("p50", "p99")]
        + [percent(one["counted"]["hit_rate"]), figure(one["counted"]["bytes"] / 2**30, 1)]
        for name, one in found["systems"].items()
    ]
    columns = [f"{name} {at}, s" for name in parts for at in ("p50", "p99")]
    answers = "the same answers" if found["same_answers"] else "answers that differ"
    times = found["repetitions"]
    often = "once" if times == 1 else f"{times} times in turns"
    return [
        f"Arrivals of {found['trace']} replayed live: {found['requests']} requests in a row, "
        f"{found['rate']:.2f} a second, {often}, model {found['model']}, budget "
        f"{found['budget']}; all systems gave {answers}:",
        "",
        *table(["system", "end to end, mean of each time, s", *columns, "hits", "GiB read"], rows),
        "",
        *again(),
    ]


def again() -> list[str]:
    """The same arrivals for some systems once more, in another order."""
    found = (result("serving") or {}).get("arrivals_again")
    if found is None:
        return []
    means = ", ".join(
        f"`{name}` {figure(one['e2e_seconds']['mean'], 2)} s"
        for name, one in found["systems"].items()
    )
    return [f"The same once more, in this order, mean end to end: {means}.", ""]
