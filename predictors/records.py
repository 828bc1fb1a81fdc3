"""Records in the JSON files of traces, zoos and packed stores: unknown keys are refused."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from predictors.spec import ModelSpec

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]


class StrictRecord(BaseModel):
    """A record in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelRecord(StrictRecord):
    """A `ModelSpec` as it is written to a file."""

    model_id: str
    revision: str
    config_hash: str
    num_layers: Positive
    num_experts: Positive
    top_k: Positive
    hidden_size: Positive
    dtype: str

    @classmethod
    def from_spec(cls, spec: ModelSpec) -> Self:
        return cls(**spec.as_dict())

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(**self.model_dump())


def explain_validation_error(error: ValidationError) -> str:
    """Returns the first three faults on one line, each with its dotted field."""
    return "; ".join(
        f"{'.'.join(map(str, fault['loc'])) or 'file'}: {fault['msg']}"
        for fault in error.errors(include_url=False, include_input=False)[:3]
    )
