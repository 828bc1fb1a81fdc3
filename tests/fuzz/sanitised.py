"""Runs tests over the C modules under AddressSanitizer and UBSan.

`python -m tests.fuzz.sanitised [PATH...]` compiles the modules anew and runs pytest, by default on
the fuzz corpus with its mutations and on the modules' own tests. Needs GCC, on Linux. As pytest's
plugin, this module puts the compiled ones in place of those that are installed.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

MODULES = ("predictors.networks.kernels", "runtime.store.ggml.products", "runtime.transfer.rings")
PARTS = ("predictors/networks", "runtime/store/ggml", "runtime/transfer")
TESTS = ("tests/fuzz/test_corpus.py", *(f"tests/unit/{part}" for part in PARTS))
FLAGS = ("-O1", "-g", "-fPIC", "-shared", "-pthread", "-fno-omit-frame-pointer")
SANITISERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so.6")
"""Loaded before the interpreter, which was not built for them; the last is PyTorch's."""
FOLDER = "MOECAST_SANITISED"


def compile_modules(folder: Path) -> None:
    include = sysconfig.get_paths()["include"]
    for name in MODULES:
        source, output = f"{name.replace('.', '/')}.c", folder / f"{name}.so"
        command = ["gcc", *FLAGS, *SANITISERS, f"-I{include}", source, "-o", str(output), "-lm"]
        subprocess.run(command, check=True)


def find_library(name: str) -> str:
    return subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()


def replace_modules(folder: Path) -> None:
    """Imports the compiled modules under the names of the installed ones."""
    for name in MODULES:
        path = str(folder / f"{name}.so")
        spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


def main(paths: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        compile_modules(Path(folder))
        environment = {
            **os.environ,
            FOLDER: folder,
            "LD_PRELOAD": ":".join(map(find_library, LIBRARIES)),
            # Interpreters leave memory to the system at their end.
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        }
        command = [sys.executable, "-m", "pytest", "-p", "tests.fuzz.sanitised", "-q"]
        return subprocess.run([*command, *(paths or TESTS)], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
elif FOLDER in os.environ:
    replace_modules(Path(os.environ[FOLDER]))
