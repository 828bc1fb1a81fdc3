"""The programs that are compared: environment, script and layout of the weights of each."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

WORKERS = Path(__file__).parent / "workers"


class WeightLayout(StrEnum):
    """The layouts of the same values that peers read."""

    SEPARATE = "separate"
    """One tensor for each matrix of each expert."""
    FUSED = "fused"
    """Two tensors for all experts of a layer."""
    GGUF = "gguf"


@dataclass(frozen=True)
class Peer:
    """A program, or this project with one of its systems."""

    name: str
    worker: Path
    weights: WeightLayout
    how: str
    environment: str | None = None
    """File of `requirements/`; None: the environment of this process."""
    options: dict[str, str] = field(default_factory=dict)
    own_files: bool = False
    """The peer converts the weights on its first run, which has no memory limit."""


def moecast_peer(system: str, how: str) -> Peer:
    """Returns this project with one of its systems."""
    return Peer(
        name=system,
        worker=WORKERS / "with_moecast.py",
        weights=WeightLayout.SEPARATE,
        how=how,
        options={"system": system},
    )


PEERS = (
    moecast_peer("moecast", "this project, its own system; direct reads"),
    moecast_peer("promoe", "this project as promoe describes; direct reads"),
    moecast_peer("on-demand", "this project, LRU and nothing predicted; direct reads"),
    Peer(
        name="accelerate",
        worker=WORKERS / "with_accelerate.py",
        weights=WeightLayout.FUSED,
        how="device_map: experts of as many layers in memory as fit with one more",
        environment="accelerate",
    ),
    Peer(
        name="transformers",
        worker=WORKERS / "with_transformers.py",
        weights=WeightLayout.FUSED,
        how="from_pretrained; weights stay mapped from the file; eager experts",
        environment="transformers",
        options={"experts": "eager"},
    ),
    Peer(
        name="airllm",
        worker=WORKERS / "with_airllm.py",
        weights=WeightLayout.SEPARATE,
        how="one layer after another from its own shards; takes no budget",
        environment="airllm",
        own_files=True,
    ),
    Peer(
        name="llama-cpp",
        worker=WORKERS / "with_llama_cpp.py",
        weights=WeightLayout.GGUF,
        how="llama-cpp-python, GGUF in float32 mapped from the file; built with norm_topk_prob",
        environment="llama-cpp",
    ),
    Peer(
        name="moe-infinity",
        worker=WORKERS / "with_moe_infinity.py",
        weights=WeightLayout.SEPARATE,
        how="what PyPI has under this name",
        environment="moe-infinity",
    ),
)
