"""`training.json` of an entry: the training that made it, so that it can be repeated."""

from typing import Literal

from pydantic import JsonValue, ValidationError

from predictors.records import Count, Sha256, StrictRecord, explain_validation_error
from zoo.errors import ZooError


class TrainingTrace(StrictRecord):
    """The trace that a predictor was trained on."""

    digest: Sha256
    dataset: str
    """Short name of the source of prompts."""
    hub_dataset: str | None = None
    """OWNER/NAME on the Hub, if the prompts are from there."""
    hub_revision: str | None = None
    signals: tuple[str, ...]
    num_tokens: Count
    prompts_digest: Sha256
    recording: dict[str, JsonValue]
    """Seed, lengths and sampling of the generated tokens."""
    was_named: bool
    """Whether the command named a finished trace; otherwise it recorded one from `options.data`."""


class TrainingRecord(StrictRecord):
    """The content of `training.json`. It has no folders of the machine and no secrets."""

    format_version: Literal[1] = 1
    command: str | None
    """As it was typed; None if the training was called from Python."""
    options: dict[str, JsonValue]
    """The resolved configuration of `moecast train`, of absolute paths only the last part."""
    seed: int
    threads: Count
    """CPU threads of torch: another number may change the last bits of a sum."""
    code_revision: str | None
    """Git commit of the checkout; None for an installed package."""
    versions: dict[str, str | None]
    """Packages whose version may change a result."""
    python: str
    platform: str
    machine: str
    trace: TrainingTrace

    def to_bytes(self) -> bytes:
        return (self.model_dump_json(indent=2) + "\n").encode()


def parse_training_record(data: bytes, *, what: str) -> TrainingRecord:
    """Parses `training.json`, whose digest was checked before; raises ZooError."""
    try:
        return TrainingRecord.model_validate_json(data)
    except ValidationError as error:
        reason = explain_validation_error(error)
        raise ZooError(f"{what} is not a record of a training: {reason}") from error
