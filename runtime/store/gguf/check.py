"""Checks by the header that a GGUF file holds a model that can be served.

Neither PyTorch nor Transformers is imported.
"""

import re
from pathlib import Path

from runtime.errors import CheckpointError
from runtime.store.gguf.header import GgufHeader, read_header

ARCHITECTURES = {
    "minimax-m2": "MiniMax-M2",
    "qwen2moe": "Qwen1.5-MoE and Qwen2-MoE",
    "qwen3moe": "Qwen3-MoE",
    "qwen35moe": "Qwen3.5-MoE",
}
"""Architectures, by llama.cpp's name, that Transformers builds from GGUF with routed experts which
moecast reads. `gpt-oss` is none: Transformers looks for experts under other names than llama.cpp
writes."""
KINDS = (
    *("F32", "F16", "BF16"),
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"),
)
"""Types of tensors that are read."""
EXPERTS = re.compile(r"\.ffn_(gate|up|down|gate_up)_exps\.weight$")
SPLIT = "split.count"


def check_gguf(file: Path) -> None:
    """Check that a file holds a Mixture-of-Experts model that can be served.

    Raises:
        CheckpointError: it is damaged, of another architecture, or has tensors of other types.
    """
    header = read_header(file)
    check_architecture(header)
    if header.metadata.get(SPLIT, 1) not in (0, 1):
        raise CheckpointError(
            f"{file} is one of {header.metadata[SPLIT]} parts of a model; merge them first: "
            f"llama-gguf-split --merge {file} MERGED.gguf"
        )
    check_kinds(header)


def check_architecture(header: GgufHeader) -> None:
    """Raise CheckpointError, with the architectures that are served, for any other."""
    served = ", ".join(f"{name} ({models})" for name, models in ARCHITECTURES.items())
    name = header.architecture
    if not any(map(EXPERTS.search, header.tensors)):
        raise CheckpointError(
            f"{header.file} is not a Mixture-of-Experts model: its architecture {name!r} has no "
            f"routed experts here. Served from GGUF are {served}"
        )
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.file} has the architecture {name!r}, which Transformers does not build from "
            f"GGUF with its experts. Served from GGUF are {served}; of any other, give the "
            "original checkpoint (config.json and safetensors files)"
        )


def check_kinds(header: GgufHeader) -> None:
    """Raise CheckpointError, with a command that converts, for types that are not read."""
    for tensor in header.tensors.values():
        if tensor.kind not in KINDS:
            raise CheckpointError(
                f"{header.file}: {tensor.name} has the type {tensor.kind}, which is not served "
                f"({', '.join(KINDS)} are). Convert it: llama-quantize --allow-requantize "
                f"{header.file} OUTPUT.gguf Q4_K_M"
            )
