"""Files of results, and the machine that they were measured on.

A result is a JSON document: the origin of its figures, the machine, the options of the benchmark
and what was measured, mostly `rows`, which the dataclass of the benchmark describes.
"""

import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks.config import BenchmarkConfig
from predictors.config import RunConfig
from predictors.files import to_plain_json, write_atomic
from predictors.origin import name_machine, read_git_revision, read_processor_name
from runtime.tools.report.provenance import Provenance

RESULTS = Path(__file__).parent / "results"
NO_SETTINGS = ("output", "run_dir", "debug", "seed", "origin")
"""Options that are left out of results, which say in their own `origin` where they are from."""


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
        words.append(f"{field.name}={_write_option(_plain_option(value))}")
    return " ".join(words)


def _plain_option(value: Any) -> Any:
    """Returns an option's value as JSON has it, absolute paths by their last part."""
    if isinstance(value, list):
        return list(map(_plain_option, value))
    if isinstance(value, dict):
        return {key: _plain_option(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path) or (isinstance(value, str) and "/" in value):
        path = Path(value)
        return path.name if path.expanduser().is_absolute() else str(value)
    return value.name if is_dataclass(value) else value  # type: ignore[union-attr]


def _write_option(value: Any) -> str:
    """Returns a plain value as it is written on a command line."""
    if isinstance(value, list):
        return ",".join(map(_write_option, value))
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}: {_write_option(item)}' for key, item in value.items())}}}"
    return str(value)


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


def make_document(config: BenchmarkConfig, **figures: Any) -> dict[str, Any]:
    """Returns the origin, the options, and the figures; a figure replaces the option of its name.

    Args:
        figures: values for JSON, dataclasses, and lists of them.
    """
    options = {
        field.name: _plain_option(getattr(config, field.name))
        for field in fields(config)
        if field.name not in NO_SETTINGS
    }
    return {"origin": asdict(describe_origin(config)), **options, **figures}


def write_report(config: BenchmarkConfig, **figures: Any) -> None:
    """Replaces the benchmark's file of results by the document of these figures.

    Raises:
        ValueError: a figure is not finite; what was not measured is null.
    """
    _write(config.output, make_document(config, **figures))


def write_part(config: BenchmarkConfig, part: str, **figures: Any) -> "Document":
    """Replaces one document in a file of several, and returns it as it is read again."""
    parts = json.loads(config.output.read_text()) if config.output.is_file() else {}
    _write(config.output, {**parts, part: make_document(config, **figures)})
    return read_document(config.output)[part]


def _write(output: Path, document: Mapping[str, Any]) -> None:
    text = json.dumps(document, indent=1, default=_to_json, allow_nan=False) + "\n"
    write_atomic(output, text.encode())


def _to_json(value: Any) -> Any:
    return vars(value) if is_dataclass(value) else to_plain_json(value)


class Document(dict[str, Any]):
    """An object of a committed result, whose values are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def read_document(name: str | Path) -> Document:
    """Reads a file of results, or the committed `benchmarks/results/NAME.json`."""
    path = name if isinstance(name, Path) else RESULTS / f"{name}.json"
    return json.loads(path.read_text(), object_hook=Document)


def print_line(text: str) -> None:
    """Writes a line of progress to standard error at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
