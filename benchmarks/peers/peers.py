"""The programs that are compared: environment, script and layout of the weights of each."""

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.weights import GGUF_FORMATS, LLAMA_CPP, WeightLayout

IK_LLAMA_CPP = "ik-llama-cpp"
WORKERS = Path(__file__).parent / "workers"
EXACT = ("float32", "bfloat16")
"""Formats in which all programs compute from the same values."""


@dataclass(frozen=True)
class Peer:
    """A program, or this project with one of its systems."""

    name: str
    worker: Path
    layout: WeightLayout
    """Layout of the formats that are not GGUF's."""
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

    def weights(self, name: str) -> WeightLayout:
        """Returns the layout of the weights in a format."""
        return WeightLayout.GGUF if name in GGUF_FORMATS else self.layout


def moecast_peer(system: str, how: str) -> Peer:
    """Returns this project with one of its systems."""
    return Peer(
        name=system,
        worker=WORKERS / "with_moecast.py",
        layout=WeightLayout.PACKED,
        how=how,
        formats=(*EXACT, *GGUF_FORMATS),
        options={"system": system},
    )


def gguf_peer(
    name: str,
    load: str,
    how: str,
    *,
    environment: str | None = None,
    formats: tuple[str, ...] = tuple(GGUF_FORMATS),
) -> Peer:
    """Returns a program that reads a GGUF file, with one way of loading weights."""
    environment = environment or name
    return Peer(
        name=name,
        worker=WORKERS / f"with_{environment.replace('-', '_')}.py",
        layout=WeightLayout.GGUF,
        how=how,
        formats=formats,
        environment=environment,
        options={"load": load},
        maps_weights=load != "in-memory",
        needs_all=load == "in-memory",
    )


PEERS = (
    moecast_peer("moecast", "this project, its own system; direct reads"),
    moecast_peer("promoe", "this project as promoe describes; direct reads"),
    moecast_peer("on-demand", "this project, LRU and nothing predicted; direct reads"),
    Peer(
        name="accelerate",
        worker=WORKERS / "with_accelerate.py",
        layout=WeightLayout.FUSED,
        how="device_map: experts of as many layers in memory as fit with one more",
        environment="accelerate",
        maps_weights=True,
    ),
    Peer(
        name="transformers",
        worker=WORKERS / "with_transformers.py",
        layout=WeightLayout.FUSED,
        how="from_pretrained; weights stay mapped from the file; eager experts",
        environment="transformers",
        options={"experts": "eager"},
        maps_weights=True,
    ),
    Peer(
        name="airllm",
        worker=WORKERS / "with_airllm.py",
        layout=WeightLayout.SEPARATE,
        how="one layer after another from its own shards; takes no budget",
        formats=("float32",),
        environment="airllm",
        own_files=True,
        maps_weights=True,
    ),
    gguf_peer(
        LLAMA_CPP,
        "mapped",
        "GGUF mapped from the file, not repacked",
        formats=(*EXACT, *GGUF_FORMATS),
    ),
    gguf_peer(
        f"{LLAMA_CPP}-in-memory",
        "in-memory",
        "GGUF read into memory, repacked for the processor",
        environment=LLAMA_CPP,
        formats=(*EXACT, *GGUF_FORMATS),
    ),
    gguf_peer(IK_LLAMA_CPP, "mapped", "GGUF mapped from the file, not repacked"),
    gguf_peer(
        f"{IK_LLAMA_CPP}-in-memory",
        "in-memory",
        "GGUF read into memory, repacked for the processor",
        environment=IK_LLAMA_CPP,
    ),
    gguf_peer("fastllm", "disk", "experts from the disk through its own cache"),
    gguf_peer("fastllm-in-memory", "in-memory", "experts in memory", environment="fastllm"),
    gguf_peer("neurostream", "streamed", "tensors and the most used experts stay in memory"),
)
REFERENCES = {
    **dict.fromkeys(EXACT, ("accelerate",)),
    **dict.fromkeys(
        GGUF_FORMATS, tuple(peer.name for peer in PEERS if peer.layout is WeightLayout.GGUF)
    ),
}
"""Formats to compare, and the peers whose fastest row the others are compared with."""
