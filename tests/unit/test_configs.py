"""Every YAML that ships composes and becomes the dataclass that its schema names."""

from dataclasses import is_dataclass
from functools import cache
from pathlib import Path

import pytest

import configs
from configs.compose import ConfigError, ConfigGroups, compose_defaults, compose_typed
from configs.schema import load_schemas

FOLDER = Path(configs.__file__).parent
ROOTS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
GROUPS = sorted(
    (str(path.parent.relative_to(FOLDER)), path.stem) for path in FOLDER.rglob("*/*.yaml")
)
GIVEN = {
    "zoo_show": ["name=a/b"],
    "zoo_compare": ["name=a/b", "other=a/c"],
    "zoo_score": ["name=a/b"],
    "zoo_promote": ["name=a/b", "alias=candidate"],
    "zoo_verify": ["name=a/b"],
    "zoo_pull": ["name=a/b", "zoo=builtin"],
    "zoo_push": ["path=somewhere"],
    "zoo_rm": ["name=a/b"],
    "zoo_index": ["path=somewhere"],
    "zoo_sign": ["path=somewhere", "key=somewhere"],
    "inflate": ["output=somewhere", "expert_size=8MiB"],
    "import": ["source=somewhere"],
    "pack": ["output=somewhere"],
    "batch": ["input=prompts.jsonl", "output=somewhere"],
}
"""What the user must give: there is no sensible default."""


@cache
def groups_of(root: str) -> ConfigGroups:
    return compose_defaults(root)[1]


@pytest.mark.parametrize("root", ROOTS)
def test_root__composes_and_is_typed(root: str) -> None:
    config, _ = compose_typed(root, GIVEN.get(root, []))
    assert type(config) is load_schemas(root)[root]


@pytest.mark.parametrize(("group", "choice"), GROUPS)
def test_choice__composes_and_is_typed(group: str, choice: str) -> None:
    offering = [root for root in ROOTS if group in groups_of(root).chosen]
    assert offering, f"no command takes {group}=..."
    root = min(offering, key=lambda one: len(groups_of(one).chosen))  # the quickest to compose
    config, _ = compose_typed(root, [*GIVEN.get(root, []), f"{group}={choice}"])
    assert is_dataclass(getattr(config, group))


@pytest.mark.parametrize("root", ROOTS)
def test_group__has_a_default_that_exists(root: str) -> None:
    groups = groups_of(root)
    for group, choice in groups.chosen.items():
        assert choice in groups.choices[group]


def test_every_root_schema__has_its_file() -> None:
    assert {path for path in load_schemas() if "/" not in path} == set(ROOTS)


def test_unknown_key__names_the_closest_only() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_typed("zoo_show", ["nam=a/b"])
    assert str(caught.value) == (
        "unknown option 'nam'. Did you mean 'name'? --help lists the options"
    )


def test_unknown_choice__lists_the_choices_and_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"unknown system 'promo'.*'promoe'"):
        compose_typed("generate", ["system=promo"])


def test_wrong_type__names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"seed: Value 'x'"):
        compose_typed("zoo_list", ["seed=x"])


def test_missing_value__names_the_key_as_the_user_writes_it() -> None:
    with pytest.raises(ConfigError, match=r"^path=\.\.\. is required"):
        compose_typed("zoo_push", [])


@pytest.mark.parametrize(
    "text", ["a, b (c) {d} [e]: 'f' \"g\"", "${x}", "$x\\n", "1e5", "é = 1", "50%", "a=b", ""]
)
def test_text__is_not_parsed(text: str) -> None:
    config, _ = compose_typed("zoo_list", [f"zoo={text}"])
    assert config.zoo == text


def test_null__is_none_for_optional_text() -> None:
    config, _ = compose_typed("zoo_list", ["zoo=null"])
    assert config.zoo is None
