"""Tables of the server: disconnects, its clients, and latency under a trace's arrivals."""

from collections.abc import Iterator, Mapping

from benchmarks.reports import read_report
from benchmarks.serving.distributions import latencies
from benchmarks.serving.rows import (
    AttackReport,
    ClientsReport,
    DisconnectsReport,
    FuzzReport,
    QueueReport,
    ServingReports,
    ShutdownReport,
    SoakReport,
    StormReport,
)
from benchmarks.tables.markdown import format_figure, format_percent, markdown_table, origin_line
from predictors.units import GIB, MIB

ROBUSTNESS = ("storm", "shutdown", "queue", "fuzz", "disconnects", "soak", "attack", "clients")
"""Parts of the table of the server."""
WORKS = {True: "works", False: "fails", None: "not run"}


def robustness_table() -> list[str]:
    """Returns a row for each benchmark that was run."""
    reports = read_report("serving", ServingReports) or ServingReports()
    rows = list(robustness_rows(reports))
    if not rows:
        return []
    return [
        "The server as a separate process, the reference model, clients on the same machine:",
        "",
        *markdown_table(["what", "to reach", "measured"], rows),
        "",
        *robustness_origins(reports),
    ]


def robustness_origins(reports: ServingReports) -> list[str]:
    """Returns the commands of all parts of the table, those of one day and revision in one line."""
    commands: dict[str, list[str]] = {}
    for name in ROBUSTNESS:
        if getattr(reports, name) is not None:
            command, _, others = origin_line("serving", name)[0].partition(" · ")
            commands.setdefault(others, []).append(command)
    lines = [f"{', '.join(names)} · {others}" for others, names in commands.items()]
    return [text for line in lines for text in (line, "")]


def robustness_rows(reports: ServingReports) -> Iterator[list[str]]:
    if reports.storm:
        yield storm_row(reports.storm)
    if reports.shutdown:
        yield shutdown_row(reports.shutdown)
    if reports.queue:
        yield queue_row(reports.queue)
    if reports.fuzz:
        yield fuzz_row(reports.fuzz)
    if reports.disconnects:
        yield disconnects_row(reports.disconnects)
    if reports.soak:
        yield soak_row(reports.soak)
    if reports.attack:
        yield attack_row(reports.attack)
    if reports.clients:
        yield clients_row(reports.clients)


def storm_row(storm: StormReport) -> list[str]:
    return [
        f"{storm.requests} requests for {storm.tokens:,} tokens each, their clients leave after "
        f"{storm.client_seconds:g} s; then one for 10 tokens",
        "answered within 5 s; nothing runs, waits or is pinned",
        f"{storm.next_seconds_worst:.2f} s at worst of {len(storm.runs)}; "
        f"{format_left(*(run.left for run in storm.runs))}",
    ]


def shutdown_row(shutdown: ShutdownReport) -> list[str]:
    return [
        f"SIGTERM while {shutdown.requests} answers are generated",
        "ends within 4.1 s without a grace period; with one, all accepted requests are completed, "
        "none is new, no child process is left",
        f"{shutdown.seconds_worst_without_grace:.2f} s at worst; {shutdown.completed} of "
        f"{shutdown.accepted} completed, {shutdown.late_accepted} new, "
        f"{shutdown.children_left} children",
    ]


def queue_row(queue: QueueReport) -> list[str]:
    alone, together = queue.one_after_another, queue.eight_at_a_time
    return [
        f"{alone.requests + together.requests} requests to a full queue",
        "429 and Retry-After within 50 ms",
        f"p99 {alone.p99_ms:.1f} ms one after another, {together.p99_ms:.1f} ms eight at a "
        f"time; {alone.statuses.get('429', 0) + together.statuses.get('429', 0)} times 429",
    ]


def fuzz_row(fuzz: FuzzReport) -> list[str]:
    failed = sum(count for status, count in fuzz.statuses.items() if status.startswith("5"))
    return [
        f"{fuzz.cases:,} requests made by schemathesis, or damaged",
        "no status 500; refusals in OpenAI's shape",
        f"{failed} of 500 or above, {len(fuzz.wrong)} wrong in all",
    ]


def disconnects_row(disconnects: DisconnectsReport) -> list[str]:
    grown = (disconnects.after.rss_bytes - disconnects.before.rss_bytes) / MIB
    return [
        f"{disconnects.requests:,} clients that leave at random moments",
        "no slot, thread or descriptor is leaked",
        f"{format_left(disconnects.left)}; threads {disconnects.threads_leaked:+d}, descriptors "
        f"{disconnects.descriptors_leaked:+d}, memory {grown:+.0f} MiB",
    ]


def soak_row(soak: SoakReport) -> list[str]:
    idle = [sample.anonymous_bytes / MIB for sample in soak.idle]
    slope = soak.anonymous_slope.bytes_per_hour
    return [
        f"{soak.minutes:g} minutes of mixed load, {sum(soak.counts.values())} requests",
        "memory flat, no thread or descriptor is leaked",
        f"anonymous memory of the idle server at a quarter, half and the end: "
        f"{idle[len(idle) // 4]:.0f}, {idle[len(idle) // 2]:.0f}, {idle[-1]:.0f} MiB; over the "
        f"second half {format_figure(None if slope is None else slope / MIB, 1, ' MiB per hour')}; "
        f"threads {soak.threads_leaked:+d}, descriptors {soak.descriptors_leaked:+d}",
    ]


def attack_row(attack: AttackReport) -> list[str]:
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


def clients_row(report: ClientsReport) -> list[str]:
    clients = report.clients.items()
    return [
        "other programs, unmodified: "
        + ", ".join(f"{name} {client.version or ''}" for name, client in clients),
        "work",
        ", ".join(f"{name} {WORKS[client.works]}" for name, client in clients),
    ]


def format_left(*gauges: Mapping[str, float]) -> str:
    """Returns what still ran, waited or was pinned afterwards."""
    total = sum(sum(values.values()) for values in gauges)
    return "nothing is left" if not total else f"{total:g} left"


def arrivals_table() -> list[str]:
    """Returns latency by system."""
    reports = read_report("serving", ServingReports)
    if reports is None or reports.arrivals is None:
        return []
    report = reports.arrivals
    rows = [
        [f"`{name}`", ", ".join(format_figure(m, 2) for m in system.mean_of_each_repetition)]
        + [
            format_figure(v, 2)
            for latency in latencies(system).values()
            for v in (latency.p50, latency.p99)
        ]
        + [format_percent(system.counted.hit_rate), format_figure(system.counted.bytes / GIB, 1)]
        for name, system in report.systems.items()
    ]
    names = ("end to end", "first token", "token")
    columns = [f"{name} {at}, s" for name in names for at in ("p50", "p99")]
    answers = "the same answers" if report.same_answers else "answers that differ"
    often = "once" if report.repetitions == 1 else f"{report.repetitions} times in turns"
    text = [
        f"Arrivals of {report.trace} replayed live: {report.requests} requests in a row, "
        f"{report.rate:.2f} per second, {often}, model {report.model}, budget "
        f"{report.budget}; all systems gave {answers}:",
        "",
        *markdown_table(
            ["system", "end to end, mean of each time, s", *columns, "hits", "GiB read"], rows
        ),
        "",
    ]
    if reports.arrivals_again is not None:
        means = ", ".join(
            f"`{name}` {format_figure(system.e2e_seconds.mean, 2)} s"
            for name, system in reports.arrivals_again.systems.items()
        )
        text += [f"The same once more, in this order, mean end to end: {means}.", ""]
    return [*text, *origin_line("serving", "arrivals")]
