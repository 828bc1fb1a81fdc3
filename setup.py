"""Compiles what moecast computes most often; `pyproject.toml` has the rest of the build.

These are the hot modules of the policy core, the transfer loop and the simulator, which run
uncompiled, too, the kernels of predictors' networks, in place of which onnxruntime computes, the
products of quantised experts, in place of which PyTorch computes with decoded ones, and the reads
of experts, which threads of Python do otherwise. Without Cython or a C compiler, the
package is installed all the same. `MOECAST_COMPILED=0 pip install .` leaves them out.
"""

import hashlib
import json
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from Cython.Build import cythonize
except ImportError:
    cythonize = None

ROOT = Path(__file__).resolve().parent
MODULES = (
    "policy.cache",
    "policy.counters",
    "policy.device_cache",
    "policy.forecast_scheduler",
    "policy.queue",
    "policy.tier",
    "policy.eviction.base",
    "policy.eviction.regret",
    "policy.eviction.reuse",
    "sim.machine",
    "sim.replay",
    "sim.simulator",
    "sim.step",
    "transfer.loop",
    "transfer.ring",
)
"""Modules of `runtime` that are compiled; `NAME.pxd` next to one gives it C types."""
DIRECTIVES = {
    "language_level": 3,
    # Annotations are for readers: a `Mapping` may be any, a `float` may be an int.
    "annotation_typing": False,
}
# The same rounding on every processor as in Python: no fused multiply-add. Symbols for a debugger
# would take 6 MB of the wheel.
FLAGS = ["-ffp-contract=off", "-g0", "-Wno-array-bounds"]


C_MODULES = (
    "predictors.networks.kernels",
    "runtime.store.ggml.products",
    "runtime.transfer.rings",
)


def c_modules() -> list[Extension]:
    """Return the extension modules that are written in C."""
    if os.environ.get("MOECAST_COMPILED") == "0":
        return []
    folders = [Path(*name.split(".")[:-1]) for name in C_MODULES]
    headers = [str(path) for folder in folders for path in folder.glob("*.h")]
    return [
        Extension(
            name,
            [f"{name.replace('.', '/')}.c"],
            extra_compile_args=["-O3", "-pthread"],
            extra_link_args=["-pthread"],
            libraries=["m"],
            depends=headers,
            py_limited_api=True,
            optional=True,
        )
        for name in C_MODULES
    ]


def source_files() -> list[Path]:
    """Return the files that decide what the extension modules do."""
    folders = {ROOT / "runtime" / Path(*name.split(".")[:-1]) for name in MODULES}
    types = [path for folder in folders for path in folder.glob("*.pxd")]
    return sorted([*(module_file(name) for name in MODULES), *types])


def module_file(name: str) -> Path:
    return ROOT / "runtime" / Path(*name.split(".")).with_suffix(".py")


def core_modules() -> list[Extension]:
    """Return the extension modules; none without Cython."""
    if cythonize is None or os.environ.get("MOECAST_COMPILED") == "0":
        return []
    modules = cythonize(
        [
            Extension(
                f"runtime.{name}",
                [str(module_file(name).relative_to(ROOT))],
                extra_compile_args=FLAGS,
            )
            for name in MODULES
        ],
        build_dir="build/cython",
        compiler_directives=DIRECTIVES,
        quiet=True,
    )
    for module in modules:
        module.optional = True  # which cythonize does not pass on
        # In a folder of their own, so that the Python files can be imported in their place.
        module.name = module.name.replace("runtime.", "runtime.compiled.", 1)
    return modules


class BuildCore(build_ext):
    """Builds all modules of the core or, where one cannot be built, none."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def run(self) -> None:
        super().run()
        core = [module for module in self.extensions if ".compiled." in module.name]
        paths = [Path(self.get_ext_fullpath(module.name)) for module in core]
        if not core:
            return
        if not all(path.is_file() for path in paths):
            for path in paths:
                path.unlink(missing_ok=True)
            self.warn("the policy core is not compiled: its Python files run")
            return
        folder = paths[0].parent
        while folder.name != "compiled":
            folder = folder.parent
        # Modules of an earlier version would take precedence over Python files of the same name.
        for path in {*folder.rglob(f"*{paths[0].suffix}")} - {*paths}:
            path.unlink()
        digests = {
            str(path.relative_to(ROOT / "runtime")): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in source_files()
        }
        (folder / "sources.json").write_text(json.dumps(digests, indent=1) + "\n")

    def copy_extensions_to_source(self) -> None:
        for module in self.extensions:
            Path(self.get_ext_fullpath(module.name)).parent.mkdir(parents=True, exist_ok=True)
        super().copy_extensions_to_source()


setup(ext_modules=[*c_modules(), *core_modules()], cmdclass={"build_ext": BuildCore})
