"""The notebooks of `examples/`: they run, and their committed outputs are in order."""

import re
from pathlib import Path

import nbformat
import pytest

from tests.builders.pages import replace_words

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))
SHORTER = {
    'heart pumps blood", 48': 'heart pumps blood", 8',
    '"10%", "25%", "50%"': '"25%",',
    "data.num_prompts=40": "data.num_prompts=10",
    "data.max_new_tokens=12": "data.max_new_tokens=4",
    "max_epochs=2 replay_tokens=24": "max_epochs=1 replay_tokens=4",
    "replay_tokens=36": "replay_tokens=4",
}
"""What the committed outputs are of, for seconds in place of minutes."""
LARGEST_BYTES = 400_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks__run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    text = "\n".join(cell.source.removeprefix("%%capture\n") for cell in cells)
    assert "\n%" not in text
    shorter = replace_words(text, SHORTER)
    assert shorter != text
    exec(compile(shorter, path.name, "exec"), {})


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
