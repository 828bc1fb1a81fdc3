"""Files of results, and the machine that they were measured on."""

import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from benchmarks.config import BenchmarkConfig
from predictors.config import RunConfig
from predictors.files import to_plain_json, write_atomic
from predictors.origin import name_machine, read_git_revision, read_processor_name
from runtime.tools.report.provenance import Provenance

RESULTS = Path(__file__).parent / "results"

Report = TypeVar("Report")


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The machine that figures were measured on."""

    cpu: str
    cores: int | None
    threads: int
    """Threads that the benchmark uses."""
    memory_bytes: int
    kernel: str
    read_ahead_kib: dict[str, int]
    """Read-ahead of each block device."""
    load_average_at_start: float
    """Runnable processes before the benchmark, mean of a minute."""
    date: str
    python: str


def describe_machine(threads: int | None = None) -> MachineFacts:
    """Reads processor, memory, kernel, read-ahead and load; call it before the benchmark starts.

    Args:
        threads: threads that the benchmark uses; None: PyTorch's default.
    """
    devices = Path("/sys/block").glob("*/queue/read_ahead_kb")
    return MachineFacts(
        cpu=read_processor_name(),
        cores=os.cpu_count(),
        threads=threads or int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=platform.release(),
        read_ahead_kib={
            path.parts[3]: int(path.read_text())
            for path in devices
            if not path.parts[3].startswith("loop")
        },
        load_average_at_start=os.getloadavg()[0],
        date=datetime.now(UTC).date().isoformat(),
        python=platform.python_version(),
    )


def command_line(command: str, config: RunConfig) -> str:
    """Returns the command with the options that differ from their defaults.

    The output file is left out, and of other paths all but the last part.
    """
    words = ["python -m benchmarks", command]
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if value == default or field.name in ("output", "run_dir", "debug"):
            continue
        words.append(f"{field.name}={_format_option(value)}")
    return " ".join(words)


def _format_option(value: Any) -> str:
    """Returns an option's value as it is written on a command line, paths by their last part."""
    if isinstance(value, list):
        return ",".join(map(_format_option, value))
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}: {_format_option(item)}' for key, item in value.items())}}}"
    if isinstance(value, str) and "/" in value and Path(value).expanduser().is_absolute():
        return Path(value).name
    return str(value.value if isinstance(value, Enum) else getattr(value, "name", value))


def describe_origin(config: RunConfig) -> Provenance:
    """Returns the origin of a benchmark's results, which are about to be written."""
    words = re.findall("[A-Z][a-z]*", type(config).__name__.removesuffix("Config"))
    return Provenance(
        command=command_line("-".join(words).lower(), config),
        date=datetime.now(UTC).date().isoformat(),
        revision=read_git_revision(),
        machine=name_machine(),
        seed=config.seed,
    )


def make_report(kind: type[Report], config: RunConfig, **figures: Any) -> Report:
    """Returns a report of these figures; its other fields are the options of the same names."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    options = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return kind(**{**options, **figures})


def write_report(config: BenchmarkConfig, report: Any) -> None:
    """Replaces the benchmark's file of results.

    Args:
        report: a dataclass, to which the origin of its figures is added, or a mapping of documents
            that have theirs.

    Raises:
        ValueError: a figure is not finite; what was not measured is null.
    """
    if isinstance(report, Mapping):
        document = report
    else:
        document = {"origin": asdict(describe_origin(config)), **asdict(report)}
    text = json.dumps(document, indent=1, default=to_plain_json, allow_nan=False) + "\n"
    write_atomic(config.output, text.encode())


def read_report(name: str, kind: type[Report]) -> Report:
    """Reads the committed `benchmarks/results/NAME.json`."""
    return TypeAdapter(kind).validate_json((RESULTS / f"{name}.json").read_bytes())


def print_line(text: str) -> None:
    """Writes a line of progress to standard error at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
