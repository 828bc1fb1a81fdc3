"""The wheel: its files, its size, and its command and import in a folder of a user's files."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from runtime.compiled import SOURCES
from tests.builders.processes import ROOT, run, run_python
from tests.builders.shadows import shadowing_folder

PACKAGES = ("collect", "configs", "moecast", "predictors", "runtime", "train", "zoo")
MOST_BYTES = 85_000_000
"""PyPI takes 100 MB. The reference model has 45 MB, the built-in zoo 33."""

MADE = (".*", "__pycache__", "*.so", SOURCES)
"""Patterns of what is no source."""
TRANSLATIONS = ROOT / "build/cython"
BUILD_SECONDS = 400
"""Two cores compile the policy core in a minute and a half."""
CORE = """from runtime.policy import tier; from runtime.sim import simulator, replay
print(tier.__file__, simulator.__file__, replay.__file__)"""
COMPILED = f"""{CORE}
from predictors.networks import kernels; from runtime.transfer import rings
print(kernels.__file__, rings.__file__)"""


def list_files(package: str) -> set[str]:
    """Files of a package in the checkout that are neither built, made by Python nor hidden."""
    files = [path.relative_to(ROOT) for path in (ROOT / package).rglob("*") if path.is_file()]
    return {str(path) for path in files if not shutil.ignore_patterns(*MADE)("", path.parts)}


def copy_sources(target: Path, *more_ignored: str) -> None:
    """Copy what a wheel is built from, without what was compiled in the checkout.

    Cython's translations come along, if the checkout was built. It translates what is newer anew.
    """
    ignore = shutil.ignore_patterns(*MADE, *more_ignored)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, target / package, ignore=ignore)
    if TRANSLATIONS.is_dir():
        shutil.copytree(TRANSLATIONS, target / TRANSLATIONS.relative_to(ROOT))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)


def install_wheel(source: Path, folder: Path, environment: dict[str, str]) -> Path:
    """Build a wheel and unpack it, as pip does below site-packages; return that folder."""
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    build = [*pip, "wheel", *options, "-w", folder, source]
    run_python(*build, environment=environment, timeout=BUILD_SECONDS)
    shutil.rmtree(source)
    (wheel,) = folder.glob("*.whl")
    assert wheel.stat().st_size < MOST_BYTES
    target = folder / "installed"
    run_python(*pip, "install", *options, "--no-compile", "--target", target, wheel)
    return target


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_sources(folder / "source")
    # Optimising the policy core would take a minute more, and changes no file.
    return install_wheel(folder / "source", folder, {"CFLAGS": "-O0"})


def run_in(installed: Path, folder: Path, *command: str | Path) -> str:
    """Run a command in a folder of a user's, with the wheel on the search path; return its text."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    environment.pop("PYTHONSAFEPATH", None)
    return run(*command, folder=folder, environment=environment).stdout


def test_wheel__has_every_file_of_the_packages(installed: Path) -> None:
    names = [name for package in PACKAGES for name in list_files(package)]
    assert not [name for name in names if not (installed / name).is_file()]
    others = {path.name for path in installed.iterdir()} - {*PACKAGES, "bin"}
    assert all(name.endswith(".dist-info") for name in others)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_wheel__has_compiled_code(installed: Path, tmp_path: Path) -> None:
    paths = run_in(installed, tmp_path, sys.executable, "-c", COMPILED).split()
    assert len(paths) == 5
    assert all(Path(path).is_relative_to(installed) and path.endswith(".so") for path in paths)


def test_wheel__runs_whatever_lies_in_the_current_folder(installed: Path, tmp_path: Path) -> None:
    folder = shadowing_folder(tmp_path)
    moecast = [sys.executable, installed / "bin" / "moecast"]
    assert run_in(installed, folder, *moecast, "--version").startswith("moecast ")
    options = ["prompt=The heart", "budget=50%", "max_new_tokens=4", "run_dir=run"]
    assert run_in(installed, folder, *moecast, "generate", *options).strip()
    assert (folder / "run/results.json").is_file()
    code = "from moecast import load; print(load.__module__)"
    assert run_in(installed, folder, sys.executable, "-c", code).strip()


def test_wheel__without_a_compiler_runs_the_python_files(tmp_path: Path) -> None:
    copy_sources(tmp_path / "source", "blobs", "*.safetensors")
    installed = install_wheel(tmp_path / "source", tmp_path, {"CC": "/bin/false"})
    assert not [*installed.rglob("*.so"), *installed.rglob(SOURCES)]
    paths = run_in(installed, tmp_path, sys.executable, "-c", CORE).split()
    names = ("policy/tier", "sim/simulator", "sim/replay")
    assert paths == [str(installed / f"runtime/{name}.py") for name in names]
