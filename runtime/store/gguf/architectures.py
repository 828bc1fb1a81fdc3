"""The tables of the architectures of GGUF files that are served.

What a file states is in its metadata, whose keys have the same meaning in every architecture, and
its tensors have names that gguf's own tables map to a model's, but for a few. `translation.yaml`
says what these are in Transformers, `vocabularies.yaml` how text is split into tokens.
`architectures.yaml` has what differs: the model's type, what llama.cpp takes for granted, and what
its converter does to tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from predictors.typed_values import read_table


@dataclass(frozen=True)
class Architecture:
    """Rules by which files of one of llama.cpp's architectures become a model of Transformers."""

    models: str
    """The models' names, for people."""
    model_type: str
    """Transformers' name of the configuration."""
    gating: str = "softmax"
    """Function of the router's logits; a file that states another is refused."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of the configuration where the metadata state none."""
    ends: Sequence[str] = ()
    """Texts of tokens that end an answer, besides those that the metadata name."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """By key of the metadata: what the model always computes; another value is refused."""
    window_step: int = 0
    """With a sliding window: every so many layers one has none, where the metadata state none."""
    linear: str = ""
    """Transformers' name of layers without attention: those that have no `attn_q` here."""
    undo: Mapping[str, str] = field(default_factory=dict)
    """By end of a parameter's name: the function of `runtime.store.gguf.rows` that makes it of
    what is stored; the first that fits, empty for none."""
    variant: Mapping[str, Any] = field(default_factory=dict)
    """Differences where the metadata have the values of `where`."""


@dataclass(frozen=True)
class Translation:
    """Names in GGUF files, of every architecture, and what they are in Transformers."""

    fields: Mapping[str, Sequence[str]]
    """By key of the metadata: the configuration's name, the first that it has."""
    needed: Sequence[str]
    """Keys that every file has."""
    defaults: Mapping[str, Any]
    """llama.cpp's values where a key is missing; a model without the field computes by them too."""
    elsewhere: Sequence[str]
    """Keys that are read apart, or say what tensors' shapes and names say, too: these are compared
    with the model's."""
    arrays: Sequence[str]
    """Keys with a value for each layer, in which layers differ."""
    gating: Mapping[int, str]
    """llama.cpp's numbers of functions that make weights of a router's logits."""
    flags: Mapping[str, str]
    """Fields of the configuration that are true where a layer has the tensor."""
    scaling: Mapping[str, Mapping[str, str]]
    """By kind of `rope.scaling`: the names of its metadata."""
    experts: Mapping[str, Sequence[Sequence[str]]]
    """By parameter of experts: the tensors that its rows come from, in order; the first that a file
    has."""
    tensors: Mapping[str, Sequence[str]]
    """By end of a parameter's name: a block's tensors, where gguf's tables have none for it."""


def _read(name: str) -> dict[str, Any]:
    values: dict[str, Any] = read_table(Path(__file__).with_name(name))
    return values


@cache
def read_architectures() -> Mapping[str, Architecture]:
    """Return the architectures by llama.cpp's names."""
    return {name: Architecture(**values) for name, values in _read("architectures.yaml").items()}


@cache
def read_translation() -> Translation:
    return Translation(**_read("translation.yaml"))


@cache
def read_splits() -> Mapping[str, Sequence[str] | str]:
    """Return expressions that split text, or another kind's name, by kind of the vocabulary."""
    return _read("vocabularies.yaml")
