"""The checkout, the packages and the machine that results are made with."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULT_PACKAGES = (
    *("moecast", "torch", "transformers", "numpy", "onnxruntime", "lightning", "datasets"),
)
"""Packages whose version may change a result."""
CHECKOUT = Path(__file__).resolve().parent.parent
RESULTS = ":(exclude)benchmarks/results"
"""The committed results, as git leaves them out."""


def package_version(name: str) -> str | None:
    """Returns the version of an installed package, which is not imported; None without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def package_versions(names: Iterable[str]) -> dict[str, str | None]:
    return {name: package_version(name) for name in names}


def read_git_revision(checkout: Path = CHECKOUT) -> str | None:
    """Returns the commit of this checkout, `-dirty` if edited; None outside a checkout.

    Results of benchmarks do not count as edits: the first of several would make the others dirty.
    """
    if not (checkout / ".git").exists():
        return None
    revision, edited = ("rev-parse", "HEAD"), ("diff", "--name-only", "HEAD", "--", ".", RESULTS)
    try:
        commit, edits = (
            subprocess.run(
                ["git", "-C", str(checkout), *words],
                capture_output=True, text=True, timeout=10, check=True, stdin=subprocess.DEVNULL,
            ).stdout.strip()
            for words in (revision, edited)
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"warning: the git revision could not be read ({error})\n")
        return None
    return f"{commit}-dirty" if edits else commit


INSTRUCTIONS = {
    "amx_tile": "AMX",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
}
"""Linux's flags for the instructions that speed depends on, the fastest first."""


def read_processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's name as the operating system reports it, and its instructions.

    Virtual machines have one name for processors of several generations: `AMD EPYC with AVX2`.
    """
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    lines = [line.partition(":") for line in reversed(text.splitlines())]
    facts = {key.strip(): value.strip() for key, _, value in lines}
    name = facts.get("model name") or platform.processor() or platform.machine()
    flags = facts.get("flags", "").split()
    known = [f" with {what}" for flag, what in INSTRUCTIONS.items() if flag in flags]
    return name + "".join(known[:1])


def name_machine() -> str:
    """Returns cores and processor of this machine, such as `2 cores of AMD EPYC with AVX2`."""
    return f"{os.cpu_count()} cores of {read_processor_name()}"
