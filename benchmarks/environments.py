"""Environments of other programs: a virtual environment with pinned packages for each of them.

An environment that was built from the same files is kept. llama.cpp is compiled, which takes some
ten minutes on two cores.
"""

import hashlib
import shutil
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.config import EnvironmentsConfig
from benchmarks.process import ProcessFailed, run_program
from benchmarks.reports import print_line
from predictors.errors import MoecastError, unknown

REQUIREMENTS = Path(__file__).parent / "requirements"
STAMP = "built-from.txt"
OFFLINE = {"HF_HUB_OFFLINE": "1", "NO_PROXY": "*"}
"""Variables of programs that ask a server of this machine, and nobody else."""


@dataclass(frozen=True)
class SourceBuild:
    """A package that is built from its source after edits."""

    package: str
    edits: dict[str, tuple[str, str]]
    """File to its edit: text that occurs once, and its replacement."""
    environment: dict[str, str] = field(default_factory=dict)


WITHOUT_DEPENDENCIES = {"fastllm": "ftllm==1.9.0"}
"""Packages whose long list of dependencies a worker does without, by environment."""
SOURCES = {
    "llama-cpp": SourceBuild(
        package="llama-cpp-python==0.3.36",
        # llama.cpp's qwen2moe graph leaves the weights of the chosen experts as the softmax over
        # all gave them (norm_topk_prob=false, as in Qwen1.5-MoE); the reference model has them add
        # up to one. No key of a GGUF file says so for this architecture.
        edits={
            "vendor/llama.cpp/src/models/qwen2moe.cpp": (
                "LLM_FFN_SILU, false,",
                "LLM_FFN_SILU, true,",
            ),
            # Compilers drop the stores to the tile configuration that nothing appears to read, and
            # the first AMX instruction is then an invalid one (llama.cpp's pull request 26954).
            "vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp": (
                "_tile_loadconfig(&tc);",
                'asm volatile("" : : "r"(&tc) : "memory"); _tile_loadconfig(&tc);',
            ),
            # Half of the compilation, and the Python package uses none of it.
            "CMakeLists.txt": (
                "LLAMA_BUILD_COMMON ON CACHE BOOL",
                "LLAMA_BUILD_COMMON OFF CACHE BOOL",
            ),
        },
        environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF"},
    )
}


class BuildFailed(RuntimeError):
    """An environment could not be built."""


def environment_names() -> list[str]:
    """Returns the environments: one for each file of requirements."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def interpreter(name: str, folder: Path) -> Path:
    """Returns the Python of an environment.

    Raises:
        ProcessFailed: the environment is not built, or from other files.
    """
    if not is_built(name, folder):
        raise ProcessFailed(
            f"no environment; build it: python -m benchmarks environments name={name}"
        )
    return (folder / name / "bin" / "python").absolute()


def fingerprint(name: str) -> str:
    """Returns the digest of everything that an environment is made from."""
    parts = [(REQUIREMENTS / f"{name}.txt").read_bytes(), sys.version.encode()]
    parts.append(repr(SOURCES.get(name)).encode())
    if name in WITHOUT_DEPENDENCIES:
        parts.append(WITHOUT_DEPENDENCIES[name].encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def is_built(name: str, folder: Path) -> bool:
    """Returns whether the environment is complete and from the present files."""
    stamp = folder / name / STAMP
    return stamp.is_file() and stamp.read_text().strip() == fingerprint(name)


def build_environment(name: str, folder: Path) -> None:
    """Rebuilds one environment.

    Raises:
        ProcessFailed: pip or a compiler failed.
        BuildFailed: the source is not the one that the edits are for.
    """
    target = folder / name
    shutil.rmtree(target, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    run_program([sys.executable, "-m", "venv", target])
    pip = (target / "bin" / "python", "-m", "pip")
    run_program([*pip, "install", "-r", REQUIREMENTS / f"{name}.txt"])
    if (package := WITHOUT_DEPENDENCIES.get(name)) is not None:
        run_program([*pip, "install", "--no-deps", package])
    if (source := SOURCES.get(name)) is not None:
        with tempfile.TemporaryDirectory() as scratch:
            run_program(
                [*pip, "download", "--no-deps", "--no-binary", ":all:", "--dest", scratch,
                 source.package]
            )  # fmt: skip
            tree = edit_source(Path(scratch), source)
            run_program([*pip, "install", "--no-deps", tree], environment=source.environment)
    (target / STAMP).write_text(fingerprint(name) + "\n")


def edit_source(scratch: Path, source: SourceBuild) -> Path:
    """Unpacks the downloaded source and edits it; returns its folder.

    Raises:
        BuildFailed: a text to edit does not occur exactly once.
    """
    archive = next(scratch.glob("*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
    tree = scratch / archive.name.removesuffix(".tar.gz")
    for name, (old, new) in source.edits.items():
        text = (tree / name).read_text()
        if text.count(old) != 1:
            raise BuildFailed(f"{source.package}: {old!r} occurs {text.count(old)} times in {name}")
        (tree / name).write_text(text.replace(old, new))
    return tree


def run_environments(config: EnvironmentsConfig) -> None:
    """Builds the environments that are missing; the first failure ends the command."""
    known = environment_names()
    for name in config.name:
        if name not in known:
            raise MoecastError(unknown("name", name, known))
    for name in config.name or known:
        if is_built(name, config.folder):
            print_line(f"{name}: already built")
            continue
        print_line(f"{name}: building")
        build_environment(name, config.folder)
