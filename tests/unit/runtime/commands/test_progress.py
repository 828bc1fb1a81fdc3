"""Progress of long commands where no terminal shows a bar."""

import io

import pytest
from rich.console import Console

from runtime.commands import progress as progress_module
from runtime.commands.progress import describe_duration, progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only element."""
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


def test_progress__prints_rate_and_time_left_every_few_seconds(clock: list[float]) -> None:
    out = io.StringIO()
    with progress(Console(file=out), "recording", total=10_000, unit="tokens") as advance:
        for _ in range(25):
            clock[0] += 1
            advance(100)
    line = "recording: {} %, 100 tokens/s, {} s left"
    assert out.getvalue().splitlines() == [line.format(10, 90), line.format(20, 80)]


def test_progress__on_a_terminal_shows_the_rate_beside_the_bar(clock: list[float]) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with progress(console, "recording", total=10_000, unit="tokens") as advance:
        clock[0] += 2
        advance(2_468)
    assert "1,234 tokens/s" in out.getvalue()


DURATIONS = [(0.4, "0 s"), (99.4, "99 s"), (510, "8 min"), (9000, "2.5 h")]


@pytest.mark.parametrize(("seconds", "text"), DURATIONS)
def test_describe_duration__uses_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert describe_duration(seconds) == text
