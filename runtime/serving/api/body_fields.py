"""The common part of all request bodies: JSON objects without unknown keys, and their limits."""

import json
from collections.abc import Mapping, Sequence, Sized
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Tag,
    model_validator,
)

from predictors.records import whole_number
from runtime.generation.messages import check_encodable

MAX_FIELDS = 100
"""Fields of an object, of which OpenAI's API has about forty."""
MAX_ITEMS = 4096
"""Items of a list other than tokens."""
MAX_LEVELS = 100
"""Levels of an object that others read, which they do by recursion."""
UNSUPPORTED = "it is not supported by this server; leave it out"
SHOWN_LENGTH = 40
"""Characters of a wrong value that its message quotes."""

TEXT, LIST = Tag("<text>"), Tag("<list>")
"""Tags of the forms of a field that may be a text or a list; no field of an object is named so."""


class FieldError(ValueError):
    """A value that is wrong for a reason that its type does not say.

    Args:
        field: the field of the object at fault; None: the object itself.
    """

    def __init__(self, problem: str, *, field: str | None = None):
        super().__init__(problem)
        self.field = field


def at_most(limit: int) -> BeforeValidator:
    """Rejects what has more items, before any of them is validated.

    A body of a megabyte would otherwise become some hundred thousand errors, in seconds during
    which the server answers nobody.
    """

    def check(given: Any) -> Any:
        if isinstance(given, Sized) and len(given) > limit:
            raise ValueError(f"it has {len(given)} items; at most {limit} are allowed")
        return given

    return BeforeValidator(check)


def kind_of_list(given: Any) -> str:
    return LIST.tag if isinstance(given, list) else TEXT.tag


FIRST_ERROR = Field(fail_fast=True)
"""Validation of a list ends at the first invalid item."""
Item = TypeVar("Item")
Items = Annotated[list[Item], FIRST_ERROR, Field(min_length=1), at_most(MAX_ITEMS)]
"""A list that has an item, and not too many."""
Text = Annotated[str, AfterValidator(check_encodable)]


def check_json(given: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for an object that is too deep, or has what JSON or UTF-8 cannot express."""
    level: list[Any] = [given]
    for _ in range(MAX_LEVELS):
        objects = [list(one.values()) if isinstance(one, dict) else one for one in level]
        level = [item for one in objects if isinstance(one, list) for item in one]
        if not level:
            break
    else:
        raise ValueError(f"it has more than {MAX_LEVELS} levels")
    try:
        text = json.dumps(given, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ValueError("it has a number that is not finite, or too large for one") from error
    check_encodable(text)
    return given


JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]
"""Any object, for others to read."""


class RequestBody(BaseModel):
    """A JSON object without unknown keys and without type coercion; null is absence."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    ignored_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted and ignored."""

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        # First: whatever looks at each field would hold the event loop for many of them.
        if len(given) > MAX_FIELDS:
            raise ValueError(f"it has {len(given)} fields; at most {MAX_FIELDS} are allowed")
        fields = {name: value for name, value in given.items() if value is not None}
        cls.check_fields(fields)
        ignored = cls.ignored_fields - cls.model_fields.keys()
        return {name: value for name, value in fields.items() if name not in ignored}

    @classmethod
    def check_fields(cls, fields: dict[str, Any]) -> None:
        """Raise for fields that would change the answer, before any is validated."""


# ---- errors in the user's words

PROBLEMS = {
    "missing": "is required",
    "extra_forbidden": "unknown field",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "string_type": "must be a text",
    "text_or_list": "must be a text or a list",
    "string_unicode": "it has half a surrogate pair, which is no character",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "too_short": "it is empty; give at least one item",
    "string_too_short": "it is empty; give at least one character",
    "too_long": "must have at most {max_length} items",
    "string_too_long": "must have at most {max_length} characters",
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "value_error": "{error}",
    "json_invalid": "it is not valid JSON: {error}",
}
"""Pydantic's kinds of errors, whose own messages are written for Python's users."""


def describe_problem(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors in words about JSON, with the value if it is short."""
    context = error.get("ctx", {})
    kind = error["type"]
    if isinstance(context.get("error"), UnicodeError):
        kind = "string_unicode"
    elif kind == "string_type" and error["loc"][-1] == TEXT.tag:
        kind = "text_or_list"
    template = PROBLEMS.get(kind)
    if template is None:
        return str(error["msg"])
    problem = template.format(**{name: whole_number(limit) for name, limit in context.items()})
    given = error.get("input")
    if problem.startswith("must be") and isinstance(given, str | int | float):
        shown = {True: "true", False: "false"}[given] if isinstance(given, bool) else repr(given)
        if len(shown) <= SHOWN_LENGTH:
            problem += f"; got {shown}"
    return problem


def field_path(location: Sequence[int | str]) -> str:
    """A place in a body as in Python, such as `messages[1].content[0].type`; empty: all of it."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not (part.startswith("<") or part == "[key]"):
            path += f".{part}" if path else part
    return path
