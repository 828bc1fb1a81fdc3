"""What a child process is asked to do, and what it answers."""

from dataclasses import dataclass
from pathlib import Path

from runtime.config import ModelConfig, StoreConfig, SystemConfig
from runtime.tools.bench.requests import Request
from runtime.tools.comparison import Condition


@dataclass(frozen=True, kw_only=True)
class Served:
    """Serve the requests with a system, from an empty arena, and measure."""

    model: ModelConfig
    store: StoreConfig
    system: SystemConfig
    budget: str
    predictor: str | None
    entries: Path | None
    device: str
    requests: list[Request]
    trace_events: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Plain Transformers' tokens, all experts in memory."""

    model: ModelConfig
    device: str
    requests: dict[int, list[Request]]
    """By batch size."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Record the requests' routing, measure the machine, replay what knows the future."""

    model: ModelConfig
    systems: list[SystemConfig]
    conditions: list[Condition]
    device: str
    requests: dict[int, list[Request]]
    """By batch size."""


Task = Served | Plain | Replayed


@dataclass(frozen=True)
class Failure:
    """Why a child gave no answer."""

    reason: str
