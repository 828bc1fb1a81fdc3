"""Builds an environment of its own for each peer: a venv with pinned packages.

    python -m benchmarks.peers.environments

`only=accelerate,llama-cpp` builds some of them, `folder=PATH` elsewhere than in
`runs/peers/environments`. An environment that was built from the same files is kept. llama.cpp is
compiled, which takes some ten minutes on two cores.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements"
FOLDER = Path("runs/peers/environments")
STAMP = "built-from.txt"


@dataclass(frozen=True)
class SourceBuild:
    """A package that is built here from its source, with words changed."""

    package: str
    edits: dict[str, tuple[str, str]]
    """By file: what stands there once, and what shall."""
    environment: dict[str, str] = field(default_factory=dict)


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
    """An environment that could not be built; says in which log why."""


def names(requirements: Path = REQUIREMENTS) -> list[str]:
    """Of all environments: one for each file of requirements."""
    return sorted(path.stem for path in requirements.glob("*.txt"))


def interpreter(name: str, folder: Path = FOLDER) -> Path:
    """The Python of an environment, whether it is built or not."""
    return folder / name / "bin" / "python"


def fingerprint(name: str, requirements: Path = REQUIREMENTS) -> str:
    """Digest of everything that an environment is made from."""
    parts = [(requirements / f"{name}.txt").read_bytes(), sys.version.encode()]
    parts.append(repr(SOURCES.get(name)).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def is_built(name: str, folder: Path = FOLDER, requirements: Path = REQUIREMENTS) -> bool:
    """Whether it is there, whole and from the present files."""
    stamp = folder / name / STAMP
    return stamp.is_file() and stamp.read_text().strip() == fingerprint(name, requirements)


def build(name: str, folder: Path, requirements: Path = REQUIREMENTS) -> None:
    """Makes one environment anew.

    Raises:
        BuildFailed: pip or a compiler failed.
    """
    target = folder / name
    shutil.rmtree(target, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    with log.open("w") as lines:

        def run(*command: str | Path, **environment: str) -> None:
            done = subprocess.run(
                command, stdout=lines, stderr=lines, env=os.environ | environment, check=False
            )
            if done.returncode != 0:
                raise BuildFailed(f"{name}: exit code {done.returncode}; see {log}")

        run(sys.executable, "-m", "venv", target)
        pip = (interpreter(name, folder), "-m", "pip", "install")
        run(*pip, "-r", requirements / f"{name}.txt")
        if (source := SOURCES.get(name)) is not None:
            with tempfile.TemporaryDirectory() as scratch:
                python, into = interpreter(name, folder), Path(scratch)
                download = ("-m", "pip", "download", "--no-deps", "--no-binary", ":all:")
                run(python, *download, "--dest", into, source.package)
                run(*pip, "--no-deps", edited(into, source), **source.environment)
    (target / STAMP).write_text(fingerprint(name, requirements) + "\n")


def edited(scratch: Path, source: SourceBuild) -> Path:
    """The unpacked source tree, with its words changed.

    Raises:
        BuildFailed: what is to be changed is not there, or there twice.
    """
    archive = next(scratch.glob("*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
    tree = scratch / archive.name.removesuffix(".tar.gz")
    for name, (old, new) in source.edits.items():
        text = (tree / name).read_text()
        if text.count(old) != 1:
            raise BuildFailed(f"{source.package}: {old!r} stands {text.count(old)} times in {name}")
        (tree / name).write_text(text.replace(old, new))
    return tree


def main(
    arguments: dict[str, str], folder: Path = FOLDER, requirements: Path = REQUIREMENTS
) -> int:
    console = Console(highlight=False, soft_wrap=True)
    folder = Path(arguments.get("folder", folder))
    wanted = arguments["only"].split(",") if "only" in arguments else names(requirements)
    failed = 0
    for name in wanted:
        if is_built(name, folder, requirements):
            console.print(f"{name}: there")
            continue
        console.print(f"{name}: building")
        try:
            build(name, folder, requirements)
        except BuildFailed as error:
            console.print(str(error))
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(dict(argument.split("=", 1) for argument in sys.argv[1:])))
