"""Who is compared: each with its environment, its script and its layout of the weights."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
SYSTEMS = Path(__file__).parents[2] / "configs" / "system"


class Weights(StrEnum):
    """The same values in the layouts that peers read."""

    SEPARATE = "separate"
    """As inflated: one tensor per expert's matrix."""
    FUSED = "fused"
    """Two tensors for all experts of a layer."""
    GGUF = "gguf"


@dataclass(frozen=True)
class Peer:
    name: str
    worker: str
    weights: Weights
    how: str
    environment: str | None = None
    """Of `requirements/`; none: the one that this benchmark runs in."""
    options: dict[str, str] = field(default_factory=dict)
    own_files: bool = False
    """Writes weights in a layout of its own when it first sees them: done before, and without the
    limit; these files are then what it reads."""

    @property
    def script(self) -> Path:
        return WORKERS / self.worker


def ours(system: str, how: str) -> Peer:
    return Peer(
        name=system,
        worker="with_moecast.py",
        weights=Weights.SEPARATE,
        how=how,
        options={"system": system, "systems": str(SYSTEMS)},
    )


PEERS = (
    ours("moecast", "this project, its own system; direct reads"),
    ours("promoe", "this project as promoe describes; direct reads"),
    ours("on-demand", "this project, LRU and nothing predicted; direct reads"),
    Peer(
        name="accelerate",
        worker="with_accelerate.py",
        weights=Weights.FUSED,
        how="device_map: experts of as many layers in memory as fit beside one more",
        environment="accelerate",
    ),
    Peer(
        name="transformers",
        worker="with_transformers.py",
        weights=Weights.FUSED,
        how="from_pretrained; weights stay mapped from the file; eager experts",
        environment="transformers",
        options={"experts": "eager"},
    ),
    Peer(
        name="airllm",
        worker="with_airllm.py",
        weights=Weights.SEPARATE,
        how="one layer after another from its own shards; takes no budget",
        environment="airllm",
        own_files=True,
    ),
    Peer(
        name="llama-cpp",
        worker="with_llama_cpp.py",
        weights=Weights.GGUF,
        how="llama-cpp-python, GGUF in float32 mapped from the file; built with norm_topk_prob",
        environment="llama-cpp",
    ),
    Peer(
        name="moe-infinity",
        worker="with_moe_infinity.py",
        weights=Weights.SEPARATE,
        how="what PyPI has under this name",
        environment="moe-infinity",
    ),
)
