"""Which connections are closed for new ones, and when."""

import gc
import logging
import os
import resource
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.serving.connections import (
    HEADER_SECONDS,
    LINGER_SECONDS,
    MAX_CONNECTIONS,
    MIN_CONNECTIONS,
    SPARE_FILES,
    WRITE_BYTES,
    WRITE_SECONDS,
    ConnectionPhase,
    ConnectionTable,
    LimitedLog,
    client_group,
    connection_limit,
    count_open_files,
)

LOCAL, FIRST, SECOND = "127.0.0.1", "192.0.2.1", "192.0.2.2"
PHASES = tuple(ConnectionPhase)


@dataclass(eq=False)
class FakeConnection:
    phase: ConnectionPhase = ConnectionPhase.HEADERS
    address: str = LOCAL
    since: float = 0.0
    unsent: int = 0
    sent: int = 0
    events: list[str] = field(default_factory=list)

    def unsent_bytes(self) -> int:
        return self.unsent

    def sent_bytes(self) -> int:
        return self.sent

    def abort(self) -> None:
        self.events.append("abort")

    def close(self) -> None:
        self.events.append("close")


def test_full_table__closes_the_oldest_of_the_least_needed() -> None:
    table = ConnectionTable(8)
    ordered = [FakeConnection(phase, since=since) for phase in PHASES[:-1] for since in (1, 2)]
    kept = [FakeConnection(ConnectionPhase.RUNNING) for _ in range(8)]
    for connection in reversed(ordered[:8]):
        assert table.admit(connection, 0.0)
    for number, connection in enumerate(kept):
        assert table.admit(connection, 0.0)
        assert [bool(other.events) for other in ordered[:8]] == [
            place <= number for place in range(8)
        ]
    new = FakeConnection()
    assert not table.admit(new, 0.0)
    assert not any(connection.events for connection in kept)


def test_full_table__closes_those_of_the_address_that_has_most() -> None:
    table = ConnectionTable(16)
    honest = [FakeConnection(address=FIRST, since=0.0) for _ in range(2)]
    many = [FakeConnection(address=SECOND, since=1.0) for _ in range(7)]
    local = [FakeConnection(address=LOCAL, phase=ConnectionPhase.RUNNING) for _ in range(7)]
    for connection in (*honest, *many, *local):
        table.admit(connection, 0.0)
    assert table.admit(FakeConnection(address="192.0.2.3"), 0.0)
    assert not any(connection.events for connection in (*honest, *local))
    assert many[0].events == ["abort"]


def test_one_address__cannot_take_all_places() -> None:
    table = ConnectionTable(32)
    attacks = [FakeConnection(ConnectionPhase.RUNNING, FIRST) for _ in range(40)]
    admitted = [table.admit(connection, 0.0) for connection in attacks]
    assert admitted == [True] * 16 + [False] * 24
    table = ConnectionTable(32)
    local = [FakeConnection(ConnectionPhase.RUNNING, LOCAL) for _ in range(40)]
    assert [table.admit(connection, 0.0) for connection in local] == [True] * 32 + [False] * 8


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.sampled_from([LOCAL, FIRST, SECOND]))))
def test_table__never_exceeds_its_limit_nor_ends_a_running_request(
    arrivals: list[tuple[ConnectionPhase, str]],
) -> None:
    table, connections = ConnectionTable(MIN_CONNECTIONS), []
    for phase, address in arrivals:
        connection = FakeConnection(phase, address)
        connections.append(connection)
        if not table.admit(connection, 0.0):
            assert len(table) > MIN_CONNECTIONS or address != LOCAL
            table.remove(connection)
        assert len(table) <= MIN_CONNECTIONS
    for connection in connections:
        assert connection.phase is not ConnectionPhase.RUNNING or not connection.events
        table.remove(connection)
        table.remove(connection)
    assert len(table) == 0


def test_lower_limit__closes_those_beyond_it() -> None:
    table = ConnectionTable(100)
    connections = [FakeConnection(since=number) for number in range(100)]
    for connection in connections:
        table.admit(connection, 0.0)
    table.limit = 20
    assert len(table) <= 20
    assert not connections[-1].events


def test_deadlines__depend_on_the_phase() -> None:
    table = ConnectionTable()
    headers = FakeConnection(ConnectionPhase.HEADERS)
    closing = FakeConnection(ConnectionPhase.CLOSING)
    flushing = FakeConnection(ConnectionPhase.CLOSING, unsent=10)
    running = FakeConnection(ConnectionPhase.RUNNING)
    for connection in (headers, closing, flushing, running):
        table.admit(connection, 0.0)
    table.check(LINGER_SECONDS - 0.1)
    assert headers.events == closing.events == []
    table.check(LINGER_SECONDS + 0.1)
    assert closing.events == ["abort"]
    assert headers.events == flushing.events == []
    table.check(HEADER_SECONDS + 0.1)
    assert headers.events == ["close"]
    table.check(WRITE_SECONDS + 0.1)
    assert flushing.events == ["abort"]
    assert not running.events


def test_write__has_a_deadline_unless_the_client_reads() -> None:
    table = ConnectionTable()
    slow = FakeConnection(ConnectionPhase.RUNNING, unsent=10 * WRITE_BYTES)
    drip = FakeConnection(ConnectionPhase.RUNNING, unsent=10 * WRITE_BYTES)
    for connection in (slow, drip):
        table.admit(connection, 0.0)
    step = WRITE_SECONDS / 4
    for number in range(1, 20):
        slow.sent += WRITE_BYTES // 3
        drip.sent += 100
        table.check(number * step)
    assert not slow.events
    assert drip.events == ["abort"]


def test_limited_log__counts_what_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    limited = LimitedLog("trouble", interval_seconds=10.0, clock=lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(70_000):
            limited.add(client="a")
        now = 10.0
        limited.add(client="b")
    assert [record.fields["count"] for record in caplog.records] == [1, 70_000]


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1:2:3", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::1"),
        ("testclient", "testclient"),
        (None, ""),
    ],
)
def test_client_group__is_what_a_client_cannot_change(address: str | None, group: str) -> None:
    assert client_group(address) == group


def test_connection_limit__follows_the_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # closes now what earlier tests have left
    used = count_open_files()
    files = [os.dup(0) for _ in range(3)]
    try:
        assert count_open_files() == used + 3
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + SPARE_FILES + 103, hard))
        assert connection_limit() in range(95, 101)
        assert connection_limit(num_connections=3) in range(98, 104)
        assert connection_limit(reserved=0.5) in range(45, 51)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, hard))
        assert connection_limit() == MIN_CONNECTIONS
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        assert connection_limit() <= MAX_CONNECTIONS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in files:
            os.close(file)
