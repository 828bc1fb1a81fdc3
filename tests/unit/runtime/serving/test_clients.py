"""The page of clients: its lines for those that are installed here, and that none is forgotten."""

import subprocess

import pytest

from tests.builders.serving import running_server, tiny
from tests.docs.client_lines import INSTALLED, MODEL, NOT_RUN, PROGRAMS, PYTHON, client_lines


@pytest.fixture(scope="module")
def named(folder):
    with running_server(lambda: tiny(folder, served_name=MODEL)) as running:
        yield running


def test_page__has_no_client_without_a_test() -> None:
    assert set(client_lines()) == {*INSTALLED, *PYTHON, *PROGRAMS, NOT_RUN}


@pytest.mark.parametrize("name", INSTALLED)
def test_lines__connect_the_client(named, force, capsys, name):
    force("Hello to you.")
    lines = client_lines(named.url)[name]
    if name == "curl":
        done = subprocess.run(lines, shell=True, check=True, capture_output=True, text=True)
        assert "Hello to you." in done.stdout
    else:
        exec(compile(lines, name, "exec"), {})
        assert capsys.readouterr().out == "Hello to you.\n"
