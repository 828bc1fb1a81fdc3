"""Every YAML that ships composes and becomes the dataclass that its command takes."""

from pathlib import Path

import pytest

import configs
from configs.commands import PROGRAMS
from configs.compose import compose_defaults, compose_typed, find_groups, takes_several
from configs.execution import import_named
from predictors.errors import ConfigError
from predictors.typed_values import default_values, field_types, option_keys
from zoo.config import PushConfig

FOLDER = Path(configs.__file__).parent
SCHEMAS = {one.config: import_named(one.config) for several in PROGRAMS.values() for one in several}
CHOICES = sorted((path.parent.name, path.stem) for path in FOLDER.rglob("*/*.yaml"))
GIVEN = {"Inflate": ["expert_size=8MiB"], "Pull": ["name=a/b"]}
"""What the user must give of options that exclude each other."""


@pytest.mark.parametrize("path", SCHEMAS)
def test_command__composes_with_what_it_requires(path: str) -> None:
    schema = SCHEMAS[path]
    required = set(field_types(schema)) - set(default_values(schema))
    given = [f"{name}=some/{name}" for name in sorted(required)]
    given += next((more for name, more in GIVEN.items() if name in path), [])
    assert type(compose_typed(schema, given)[0]) is schema
    assert not [key for key in option_keys(schema) if key.startswith("no_")], "--no-KEY is off"


@pytest.mark.parametrize(("folder", "choice"), CHOICES)
def test_choice__is_offered_and_typed(folder: str, choice: str) -> None:
    key, schema = next(
        (key, schema)
        for schema in SCHEMAS.values()
        for key, group in find_groups(schema).items()
        if group.folder == folder and not takes_several(schema, key)
    )
    values = compose_defaults(schema, {key: [choice]})[key]
    assert set(values) == set(field_types(field_types(schema)[key]))


def test_missing_value__names_the_key_as_the_user_writes_it() -> None:
    with pytest.raises(ConfigError, match=r"^path=\.\.\. is required"):
        compose_typed(PushConfig, [])
