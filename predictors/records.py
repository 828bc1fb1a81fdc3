"""Records in the JSON files of traces, zoos and packed stores: unknown keys are refused."""

import math
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StrictInt,
    ValidationError,
    model_serializer,
    model_validator,
)

from predictors.errors import MoecastError
from predictors.spec import SAMPLES, ModelSpec

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
RouterSample = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{8 * SAMPLES}}}$")]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]


def whole_number(value: Any) -> Any:
    """Return 32 for 32.0, which data frames write for integers in columns with gaps."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_absent(value: Any) -> bool:
    """Whether it is null, or NaN, which is the null of data frames."""
    return value is None or (isinstance(value, float) and math.isnan(value))


Whole = Annotated[StrictInt, BeforeValidator(whole_number)]
"""An integer in a file that a user wrote."""


class StrictRecord(BaseModel):
    """A record in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def to_bytes(self) -> bytes:
        """Returns canonical JSON: equal records have equal digests."""
        return (self.model_dump_json(indent=2) + "\n").encode()

    @classmethod
    def parse(
        cls, data: bytes, *, wrong: str, error: type[MoecastError], hint: str | None = None
    ) -> Self:
        """Parses JSON; raises `error`, a sentence that begins with `wrong`, if it is another."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as invalid:
            raise error(
                "; ".join(filter(None, (f"{wrong}: {explain_validation_error(invalid)}", hint)))
            ) from invalid


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
    routers: tuple[RouterSample, ...] | None = None
    """`ModelSpec.routers`; left out where they are not known."""

    @model_validator(mode="after")
    def _sample_every_layer(self) -> Self:
        if self.routers is not None and len(self.routers) != self.num_layers:
            raise ValueError(f"{len(self.routers)} routers of {self.num_layers} layers")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_unknown(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Records that were written before there were samples keep their digests.
        fields: dict[str, Any] = handler(self)
        if self.routers is None:
            fields.pop("routers", None)
        return fields

    @classmethod
    def from_spec(cls, spec: ModelSpec) -> Self:
        return cls(**spec.as_dict(), routers=spec.routers)

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(**self.model_dump())


def explain_validation_error(error: ValidationError) -> str:
    """Returns the first three faults on one line, each with its dotted field."""
    return "; ".join(
        f"{'.'.join(map(str, fault['loc'])) or 'file'}: {fault['msg']}"
        for fault in error.errors(include_url=False, include_input=False)[:3]
    )
