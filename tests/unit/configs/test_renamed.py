"""Old names of options, choices and commands give an error that names the new one."""

from pathlib import Path

import pytest

from configs import choices, renamed
from configs import compose as compose_module
from configs.cli import main
from configs.command import Command
from configs.compose import ConfigError, compose_defaults, compose_typed
from configs.schema import option_keys

ROOTS = sorted(path.stem for path in choices.FOLDER.glob("*.yaml"))


@pytest.fixture(autouse=True)
def old_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        renamed,
        "OPTIONS",
        {renamed.EVERY: {"sed": "seed"}, "zoo_list": {"path": "name the place with zoo=PLACE"}},
    )
    monkeypatch.setattr(renamed, "CHOICES", {"system": {"classic": "promoe"}})
    monkeypatch.setattr(renamed, "COMMANDS", {"zoo": {"catalogue": "list"}})


@pytest.mark.parametrize("root", ["zoo_list", "generate"])
def test_old_option__names_the_new_one(root: str) -> None:
    with pytest.raises(ConfigError, match=r"^option 'sed' is now 'seed'$"):
        compose_typed(root, ["sed=3"])


def test_old_option__of_one_command_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"^option 'path': name the place with zoo=PLACE$"):
        compose_typed("zoo_list", ["path=x"])
    with pytest.raises(ConfigError, match="unknown option 'path'"):
        compose_typed("generate", ["path=x"])


@pytest.mark.parametrize("root", ["generate", "bench"])
def test_old_choice__names_the_new_one(root: str) -> None:
    with pytest.raises(ConfigError, match=r"^system 'classic' is now 'promoe'$"):
        compose_typed(root, ["system=classic"])


def test_old_key_in_a_file__names_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zoo_list.yaml").write_text(
        "defaults:\n  - /schema/zoo_list@_here_\n  - _self_\nsed: 3\n"
    )
    monkeypatch.setattr(compose_module, "FOLDER", tmp_path)
    with pytest.raises(ConfigError, match=r"^option 'sed' is now 'seed'$"):
        compose_typed("zoo_list", [])


def test_old_command__names_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    command = Command(name="list", config="zoo_list", run="zoo:none", summary="Lists entries.")
    assert main("zoo", [command], ["catalogue", "x"]) == 2
    assert capsys.readouterr().err == "error: command 'catalogue' is now 'list'\n"


def test_table__names_options_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    known = {}
    for root in ROOTS:
        config, groups = compose_defaults(root)
        known[root] = {*option_keys(config), *groups.chosen, *map(str, config)}
    anywhere = set.union(*known.values())
    for root, table in renamed.OPTIONS.items():
        options = anywhere if root == renamed.EVERY else known[root]
        for old, new in table.items():
            assert old not in options, f"{old!r} is still an option: an old name is not reachable"
            assert " " in new or new in options, f"{new!r} is not an option"
