"""Settings of the benchmarks of the server."""

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.config import ENVIRONMENTS, RESULTS, BenchmarkConfig


@dataclass(frozen=True, kw_only=True)
class ServingConfig(BenchmarkConfig):
    output: Path = RESULTS / "serving.json"


@dataclass(frozen=True, kw_only=True)
class ClientsConfig(ServingConfig):
    client: list[str] = field(default_factory=list)
    """Programs to run, with commas between them; all unless given."""
    environments: Path = ENVIRONMENTS
    """Folder of the environments that `python -m benchmarks environments` builds."""


@dataclass(frozen=True, kw_only=True)
class ArrivalsConfig(ServingConfig):
    trace: Path
    """AzureLLMInferenceTrace_conv.csv or ..._code.csv of github.com/Azure/AzurePublicDataset."""
    model: Path | None = None
    """Folder of a model; the reference model unless given."""
    system: list[str] = field(
        default_factory=lambda: ["on-demand", "promoe", "moe-infinity-request", "fmoe", "moecast"]
    )
    """Systems to serve with, one after another, with commas between them."""
    budget: str = "25%"
    """Memory for experts."""
    requests: int = 32
    """Successive requests of the trace; the seed chooses the first."""
    mean_prompt_tokens: float = 48.0
    """Mean prompt length to scale the trace to."""
    mean_new_tokens: float = 16.0
    """Mean answer length to scale the trace to."""
    load: float = 0.8
    """Request rate, as a share of what the first system serves one after another."""
    repetitions: int = 1
    """Replays of each system, interleaved; answers of all of them are pooled."""


@dataclass(frozen=True, kw_only=True)
class AttackConfig(ServingConfig):
    minutes: float = 60.0
    """Duration of the attacks."""
    honest: int = 3
    """Clients that ask questions with known answers, one after another."""
