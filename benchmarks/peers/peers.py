"""The programs that are compared: environment, script and layout of the weights of each."""

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.formats import FORMATS
from benchmarks.peers.weights import LLAMA_CPP, WeightLayout

WORKERS = Path(__file__).parent / "workers"
EXACT = ("float32", "bfloat16")
"""Formats in which all programs compute from the same values."""


@dataclass(frozen=True)
class Peer:
    """A program, or this project with one of its systems."""

    name: str
    worker: Path
    weights: WeightLayout
    how: str
    formats: tuple[str, ...] = EXACT
    environment: str | None = None
    """File of `requirements/`; None: the environment of this process."""
    options: dict[str, str] = field(default_factory=dict)
    own_files: bool = False
    """The peer converts the weights on its first run, which has no memory limit."""
    maps_weights: bool = False
    """Weights are read through the page cache, so that the disk's read-ahead decides on speed."""
    needs_all: bool = False
    """All weights are read into the peer's own memory before the first token."""


def moecast_peer(system: str, how: str) -> Peer:
    """Returns this project with one of its systems."""
    return Peer(
        name=system,
        worker=WORKERS / "with_moecast.py",
        weights=WeightLayout.PACKED,
        how=how,
        formats=tuple(FORMATS),
        options={"system": system},
    )


def llama_cpp_peer(name: str, load: str, how: str) -> Peer:
    """Returns llama.cpp with one way of loading weights."""
    return Peer(
        name=name,
        worker=WORKERS / "with_llama_cpp.py",
        weights=WeightLayout.GGUF,
        how=how,
        formats=(*EXACT, "int8", "int4"),
        environment=LLAMA_CPP,
        options={"load": load},
        maps_weights=load == "mapped",
        needs_all=load == "in-memory",
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
        maps_weights=True,
    ),
    Peer(
        name="transformers",
        worker=WORKERS / "with_transformers.py",
        weights=WeightLayout.FUSED,
        how="from_pretrained; weights stay mapped from the file; eager experts",
        environment="transformers",
        options={"experts": "eager"},
        maps_weights=True,
    ),
    Peer(
        name="airllm",
        worker=WORKERS / "with_airllm.py",
        weights=WeightLayout.SEPARATE,
        how="one layer after another from its own shards; takes no budget",
        formats=("float32",),
        environment="airllm",
        own_files=True,
        maps_weights=True,
    ),
    llama_cpp_peer(LLAMA_CPP, "mapped", "GGUF mapped from the file, not repacked"),
    llama_cpp_peer(
        f"{LLAMA_CPP}-in-memory", "in-memory", "GGUF read into memory, repacked for the processor"
    ),
)
REFERENCES = {
    "float32": ("accelerate",),
    "bfloat16": ("accelerate",),
    "int8": (LLAMA_CPP, f"{LLAMA_CPP}-in-memory"),
    "int4": (LLAMA_CPP, f"{LLAMA_CPP}-in-memory"),
}
"""Formats to compare, and the peers whose fastest row the others are compared with."""
