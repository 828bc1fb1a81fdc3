"""Tables of the server: attacks, its clients, and latency under a trace's arrivals."""

from benchmarks.reports import Document
from benchmarks.serving.rows import AttackReport
from benchmarks.tables.markdown import (
    format_figure,
    format_percent,
    section,
)
from predictors.units import GIB, MIB

WORKS = {True: "works", False: "fails", None: "not run"}


def robustness_table(reports: Document) -> list[str]:
    """Returns a row for the attacks and one for the clients."""
    return section(
        "The server as a separate process, the reference model, clients on the same machine:",
        ["what", "to reach", "measured"],
        [attack_row(reports.attack), clients_row(reports.clients)],
        reports.attack,
        reports.clients,
    )


def attack_row(attack: Document | AttackReport) -> list[str]:
    honest, memory, health = attack.honest, attack.memory, attack.health
    rss = [sample.rss_bytes / MIB for sample in attack.samples]
    answers = sum(sum(counts.values()) for counts in attack.hostile.values())
    refused = ", ".join(f"{number} times {status}" for status, number in honest.refused.items())
    failed = sum(honest.failed.values())
    return [
        f"{attack.minutes:g} minutes of {len(attack.hostile)} kinds of attacks in turns "
        f"({answers:,} answers to them and broken connections), next to honest clients whose "
        "answers are known; memory limited to weights other than experts + budget + 400 MiB "
        f"({memory.limit_bytes / MIB:.0f} MiB)",
        "every honest request is answered, with the text and log-probabilities of the server "
        "alone; nothing has grown",
        f"{honest.answered} of {honest.asked} answered, {honest.wrong} wrong, {failed} failed, "
        f"refused with Retry-After and asked again: {refused or 'none'}; "
        f"{attack.unexpected} answers to attacks that none expects; "
        f"`/health` p99 {health.seconds_p99:.2f} s, worst {health.seconds_worst:.2f} s, "
        f"{health.failed} of {health.probes} failed; resident memory at the start, half and the "
        f"end: {rss[0]:.0f}, {rss[len(rss) // 2]:.0f}, {rss[-1]:.0f} MiB, anonymous at most "
        f"{memory.peak_anonymous_bytes / MIB:.0f} MiB{', killed' if memory.was_killed else ''}; "
        f"threads {attack.threads_leaked:+d}, descriptors {attack.descriptors_leaked:+d}",
    ]


def clients_row(report: Document) -> list[str]:
    clients = report.clients.items()
    return [
        "other programs, unmodified: "
        + ", ".join(f"{name} {client.version or ''}" for name, client in clients),
        "work",
        ", ".join(f"{name} {WORKS[client.works]}" for name, client in clients),
    ]


def arrivals_table(reports: Document) -> list[str]:
    """Returns latency by system."""
    report = reports.arrivals
    rows = [
        [f"`{name}`", ", ".join(format_figure(m, 2) for m in system.mean_of_each_repetition)]
        + [
            format_figure(v, 2)
            for latency in (system.e2e_seconds, system.ttft_seconds, system.tpot_seconds)
            for v in (latency.p50, latency.p99)
        ]
        + [format_percent(system.counted.hit_rate), format_figure(system.counted.bytes / GIB, 1)]
        for name, system in report.systems.items()
    ]
    names = ("end to end", "first token", "token")
    columns = [f"{name} {at}, s" for name in names for at in ("p50", "p99")]
    answers = "the same answers" if report.same_answers else "answers that differ"
    often = "once" if report.repetitions == 1 else f"{report.repetitions} times in turns"
    text = (
        f"Arrivals of {report.trace} replayed live: {report.requests} requests in a row, "
        f"{report.rate:.2f} per second, {often}, model {report.model}, budget "
        f"{report.budget}; all systems gave {answers}:"
    )
    columns = ["system", "end to end, mean of each time, s", *columns, "hits", "GiB read"]
    return section(text, columns, rows, report)
