"""What is optional is not needed: every module of ours imports where the engines are not."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

IMPORT = """
import importlib, pkgutil, sys

MISSING = (
    "ray", "submitit", "s3fs", "cloudpickle", "opentelemetry.sdk", "opentelemetry.exporter"
)

class Missing:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{one}.") for one in MISSING):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
# They import Ray and OpenTelemetry: `serve` imports them where options and variables ask for it.
of_extras = ("runtime.serving.replicas", "runtime.serving.tracing")
count = 0
for root in ("predictors", "zoo", "runtime", "collect", "train", "configs", "moecast"):
    package = importlib.import_module(root)
    for found in pkgutil.walk_packages(package.__path__, f"{root}."):
        if found.name not in of_extras:
            importlib.import_module(found.name)
        count += 1
print(count)
"""


def test_core__imports_without_extras() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    num_sources = sum(
        len(list((ROOT / root).rglob("*.py")))
        for root in ("predictors", "zoo", "runtime", "collect", "train", "configs", "moecast")
    )
    # Modules that are written in C; those of `runtime/compiled` have Python files, too.
    num_compiled = len(list((ROOT / "predictors").rglob("*.so")))
    num_modules = num_sources + num_compiled - 7
    assert int(done.stdout) == num_modules, "the packages themselves are not counted"
