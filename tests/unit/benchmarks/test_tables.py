"""The README's table of speeds."""

from benchmarks.process import ROOT
from benchmarks.tables import comparing
from benchmarks.tables.readmes import BEGIN, END


def test_speed_table__is_the_readmes() -> None:
    lines = comparing.speed_table()
    _, _, rest = (ROOT / "README.md").read_text().partition(BEGIN)
    assert rest.partition(END)[0].strip() == "\n".join(lines).strip()


def test_speed_table__has_the_bound_and_other_programs() -> None:
    rows = {
        cells[1].strip(): cells[2:-1]
        for line in comparing.speed_table()
        if len(cells := line.split("|")) > 2
    }
    times = {
        label: float(cells[0].removesuffix("ms "))
        for label, cells in rows.items()
        if "ms" in cells[0]
    }
    assert min(times, key=times.get).startswith("the bound")
    assert {"Accelerate, disk offload", "llama.cpp, weights mapped from the file"} <= set(times)


def test_speed_table__is_empty_without_results(monkeypatch) -> None:
    monkeypatch.setattr(comparing, "read_document", lambda _: None)
    assert comparing.speed_table() == []
