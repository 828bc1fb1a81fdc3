"""What travels in the wheel: configurations, the reference model and the built-in zoo."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("collect", "configs", "predictors", "runtime", "train", "zoo")


def shipped(package: str) -> set[str]:
    """Files of a package in the checkout that are neither made by Python nor hidden."""
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }


@pytest.mark.slow
def test_wheel__runs_outside_the_checkout(tmp_path: Path) -> None:
    source = tmp_path / "source"
    hidden = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "runs")
    shutil.copytree(ROOT, source, ignore=hidden)
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(installed), str(source)], check=True, timeout=300)
    for package in PACKAGES:
        missing = {name for name in shipped(package) if not (installed / name).is_file()}
        assert not missing
    done = subprocess.run(
        [sys.executable, "-m", "zoo", "list", f"run_dir={tmp_path / 'run'}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout
    assert (tmp_path / "run/results.json").is_file()
