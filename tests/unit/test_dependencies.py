"""Declared dependencies are those that are imported, and serving imports no training library."""

import json
import sys
import tomllib
from functools import cache
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.builders.processes import ROOT, run_python
from tests.builders.sources import PACKAGES, Import, sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_IMPORTED = {
    "accelerate": "Transformers dequantises fp8 checkpoints with it",
    "libggml-python": "`runtime/store/ggml/library.py` opens the library in it",
    "s3fs": "fsspec imports it for s3://",
    "gcsfs": "fsspec imports it for gs://",
    "adlfs": "fsspec imports it for az://",
    "tensorboard": "torch.utils.tensorboard writes events with it",
    "sqlalchemy": "MLflow's database needs it",
    "alembic": "MLflow's database needs it",
    "atheris": "`make fuzz` needs it",
    "opentelemetry-sdk": "a part of the package opentelemetry, as the next",
    "opentelemetry-exporter-otlp-proto-http": "a part of the package opentelemetry",
}
"""Dependencies that no module names, with their reasons."""
DISTRIBUTIONS = {
    "google": "protobuf",
    "mlflow": "mlflow-skinny",
    "gcsfs": "gcsfs",
    "adlfs": "adlfs",
    "opentelemetry": "opentelemetry-api",
    "aiohttp": "fsspec",
}
"""Distribution of a module that is not installed everywhere, whose name several share, or that an
extra of the distribution installs."""
TRAINING = {
    "lightning", "datasets", "wandb", "tensorboard", "mlflow", "matplotlib", "pandas", "train",
    "pyarrow",
}  # fmt: skip
SERVES = """
import json, sys
from moecast.command import main
code = main(["generate", "max_new_tokens=2", "budget=50%", "run_dir=run"])
import runtime.commands.batch, runtime.commands.chat, runtime.commands.serve
import runtime.serving.app, runtime.serving.server
loaded = sorted({name.split(".")[0] for name in sys.modules})
print(json.dumps({"code": code, "loaded": loaded}), file=sys.stderr)
"""


def normalise(requirement: str) -> str:
    """The name in a requirement, as the package index compares names."""
    return canonicalize_name(Requirement(requirement).name)


CORE = {normalise(requirement) for requirement in PROJECT["dependencies"]}
EXTRAS = {
    normalise(requirement)
    for extra, requirements in PROJECT["optional-dependencies"].items()
    for requirement in requirements
    if extra != "dev"
}


@cache
def third_party_imports() -> dict[str, list[tuple[str, Import]]]:
    """Distribution to the modules of ours that import it, with the import."""
    known = packages_distributions()
    found: dict[str, list[tuple[str, Import]]] = {}
    for source in sources().values():
        for entry in source.imports:
            module = entry.module.split(".")[0]
            if module in sys.stdlib_module_names or module in PACKAGES:
                continue
            name = DISTRIBUTIONS.get(module) or known.get(module, [module])[0]
            found.setdefault(normalise(name), []).append((source.module, entry))
    return found


def test_dependencies__are_all_imported_or_have_a_reason() -> None:
    assert (CORE | EXTRAS) - set(third_party_imports()) == set(NOT_IMPORTED)


def test_imports__are_all_declared() -> None:
    assert not set(third_party_imports()) - CORE - EXTRAS


def test_extras__are_imported_where_they_are_used() -> None:
    """`serve` imports two modules where an option needs Ray, and a variable OpenTelemetry."""
    of_extras = {"runtime.serving.replicas": "ray"}
    of_extras["runtime.serving.observe.tracing"] = "opentelemetry-api"
    assert of_extras.items() == {
        (module, name)
        for name, users in third_party_imports().items()
        for module, entry in users
        if name in EXTRAS - CORE and entry.at_once and not entry.for_types
    }
    assert not [
        f"{source.path} imports {entry.module}"
        for source in sources().values()
        for entry in source.imports
        if entry.module in of_extras and entry.at_once and not entry.for_types
    ]


def pins() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {normalise(line) for line in lines if line and not line.startswith("#")}


def test_constraints__pin_every_dependency() -> None:
    development = {normalise(line) for line in PROJECT["optional-dependencies"]["dev"]}
    not_tested = {"gcsfs", "adlfs", "moecast"}
    assert not (CORE | EXTRAS | development) - pins() - not_tested


def test_constraints__can_be_installed_with_every_python_of_ours() -> None:
    """Debian 12 has Python 3.11.2; a pin of one that needs 3.11.5 made its installation fail."""
    minimum = PROJECT["requires-python"].removeprefix(">=") + ".0"
    pinned = pins()
    # Why `get`: once any test has imported the package importlib_metadata, it answers here in place
    # of the standard library, and `[]` of a field that is absent raises KeyError there.
    required = {
        distribution.metadata["Name"]: distribution.metadata.get("Requires-Python")
        for distribution in distributions()
        if normalise(distribution.metadata["Name"]) in pinned
    }
    assert len(required) > len(CORE)
    assert not [n for n, python in required.items() if minimum not in SpecifierSet(python or "")]


@pytest.mark.timeout(240)
def test_serving__imports_no_library_of_training(tmp_path: Path) -> None:
    done = run_python("-c", SERVES, folder=tmp_path, environment={"PYTHONPATH": str(ROOT)})
    report = json.loads(done.stderr.splitlines()[-1])
    assert report["code"] == 0, done.stderr
    assert not TRAINING & set(report["loaded"])
