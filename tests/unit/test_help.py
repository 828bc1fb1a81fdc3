"""`--help` says what there is, quickly: the slow libraries stay unimported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs.commands import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
SLOW = [
    "torch",
    "transformers",
    "datasets",
    "lightning",
    "wandb",
    "tensorboard",
    "mlflow",
    "onnx",
    "onnxruntime",
    "pandas",
    "matplotlib",
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "ray",
]
PROBE = """
import json, sys
from configs.cli import main
if sys.argv[1] == "benchmarks":
    from benchmarks.__main__ import COMMANDS
else:
    from configs.commands import PROGRAMS
    COMMANDS = PROGRAMS[sys.argv[1]]
codes = [main(sys.argv[1], COMMANDS, ["--help"])]
for command in COMMANDS:
    arguments = [one for one in (command.name, "--help", "all") if one]
    codes.append(main(sys.argv[1], COMMANDS, arguments))
print(json.dumps({"codes": codes, "modules": sorted({one.split(".")[0] for one in sys.modules})}))
"""


@pytest.mark.parametrize("program", [*PROGRAMS, "benchmarks"])
def test_help__imports_nothing_slow(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
        check=True,
    )
    *text, last = done.stdout.splitlines()
    report = json.loads(last)
    assert set(report["codes"]) == {0}
    assert not set(SLOW) & set(report["modules"])
    assert any(line.startswith(f"usage: python -m {program}") for line in text)
    assert any("run_dir" in line for line in text)
