"""`--help` says what there is, quickly: the slow libraries stay unimported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [
    name
    for name in ("collect", "train", "train.evaluate", "zoo", "runtime", "benchmarks")
    if (ROOT / name.replace(".", "/") / "__main__.py").exists()
]
SLOW = [
    "torch",
    "transformers",
    "datasets",
    "lightning",
    "wandb",
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
import importlib, json, sys
from configs.cli import main
module = importlib.import_module(sys.argv[1] + ".__main__")
codes = [main(sys.argv[1], module.COMMANDS, ["--help"])]
for command in module.COMMANDS:
    arguments = [one for one in (command.name, "--help") if one]
    codes.append(main(sys.argv[1], module.COMMANDS, arguments))
print(json.dumps({"codes": codes, "modules": sorted({one.split(".")[0] for one in sys.modules})}))
"""


@pytest.mark.parametrize("program", PROGRAMS)
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
