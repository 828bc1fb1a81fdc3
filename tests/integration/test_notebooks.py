"""The notebooks of `examples/`: they run, and their committed outputs are in order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))
RUN = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
"""
LARGEST_BYTES = 400_000


def test_notebooks__are_the_two_of_the_documentation() -> None:
    names = [path.stem for path in NOTEBOOKS]
    assert names == ["serve_and_watch_the_cache", "train_and_compare_systems"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks__run(path: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    # A separate process: the kernel listens on the loopback. Its folder is empty.
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root), "IPYTHONDIR": str(tmp_path / "ipython")},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks__have_small_outputs_without_warnings_or_paths(path: Path) -> None:
    assert path.stat().st_size < LARGEST_BYTES
    notebook = nbformat.read(path, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    for output in outputs:
        assert output.output_type in ("stream", "display_data")
        if output.output_type == "stream":
            assert output.name == "stdout"
            assert not re.search(r"(^|[\s'\"=])(/|~/|[A-Z]:\\)\w", output.text)
