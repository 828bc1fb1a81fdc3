"""Files of the user: with the names of this project's packages, of any kind and of any name."""

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from collect.config import DataConfig, SourceKind
from collect.prompts import load_prompts
from configs.arguments import read_option_file
from configs.program import hide_current_folder, run_program
from predictors.errors import MoecastError
from runtime.config import ModelConfig
from runtime.generation.batch.prompts import PromptEncoder, read_prompts
from runtime.presets import describe_choice
from runtime.serving.edge.middleware import load_api_keys
from runtime.store.packed.manifest import read_manifest
from tests.builders.models import tiny_qwen2_moe
from tests.builders.processes import ROOT, run
from tests.builders.shadows import shadowing_folder

SCRIPT = """
from pathlib import Path
from moecast import __version__

if __name__ == "__main__":
    from runtime.tools import child_process

    child_process.PRELOADED = []
    assert child_process.run_in_child("json:dumps", [1], Path("child")) == "[1]"
    try:
        import train
    except RuntimeError as error:
        print(error)
"""


def python(folder: Path, *arguments: str, check=True) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with this project at the end of the search path."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONSAFEPATH", None)
    return run(sys.executable, *arguments, folder=folder, environment=environment, check=check)


def test_command__imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    python(shadowing_folder(tmp_path), "-m", "moecast", "zoo", "list", "run_dir=run")
    assert (tmp_path / "run/results.json").is_file()


def test_module__imports_nothing_else_from_the_current_folder(tmp_path: Path) -> None:
    """Python itself imports `zoo` of `python -m zoo` from the current folder."""
    folder = shadowing_folder(tmp_path)
    (folder / "zoo.py").unlink()
    python(folder, "-m", "zoo", "list", "run_dir=run")


def test_script__imports_moecast_beside_files_of_its_packages_names(tmp_path: Path) -> None:
    (shadowing_folder(tmp_path) / "script.py").write_text(SCRIPT)
    done = python(tmp_path, "script.py")
    assert done.stdout == f"a file of the user was imported: {tmp_path / 'train.py'}\n"


def test_script__that_imported_its_own_file_is_told_to_rename_it(tmp_path: Path) -> None:
    (tmp_path / "runtime.py").write_text("")
    done = python(tmp_path, "-c", "import runtime\nfrom moecast import load", check=False)
    assert f"{tmp_path / 'runtime.py'} was imported under this name: rename" in done.stderr


def test_hiding__takes_the_folder_off_the_path_unless_a_checkout(tmp_path, monkeypatch) -> None:
    root, here = str(ROOT), str(tmp_path)
    for folder, before, after in (
        (root, [root, "/elsewhere"], [root, "/elsewhere"]),
        (here, [root, "", "/elsewhere", here, root], ["/elsewhere", root]),
    ):
        monkeypatch.chdir(folder)
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
        monkeypatch.setattr(sys, "path", before)
        hide_current_folder()
        assert sys.path == after
        assert os.environ.get("PYTHONSAFEPATH") == (None if folder == root else "1")


def test_ray_worker__imports_this_projects_packages(tmp_path: Path) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    from runtime.serving.ray_cluster import make_worker_hook

    (shadowing_folder(tmp_path) / "hook").write_bytes(cloudpickle.dumps(make_worker_hook()))
    code = "import cloudpickle, pathlib; cloudpickle.loads(pathlib.Path('hook').read_bytes())()"
    done = python(tmp_path, "-c", f"{code}; import train; print(train.__file__)")
    assert done.stdout.strip() == str(ROOT / "train/__init__.py"), done.stderr


ENCODER = PromptEncoder(PreTrainedConfig(), None)
READERS = {
    "--config": read_option_file,
    "batch input": lambda path: read_prompts(path, ENCODER, max_new_tokens=1),
    "key": lambda path: load_api_keys(f"@{path}", {}),
    "data, one file": lambda path: load_prompts(DataConfig(kind=SourceKind.TEXT, path=str(path))),
    "data, a folder": lambda path: load_prompts(
        DataConfig(kind=SourceKind.TEXT, path=str(path.parent))
    ),
    "JSON lines": lambda path: load_prompts(DataConfig(kind=SourceKind.JSONL, path=str(path))),
}


@pytest.mark.parametrize("what", READERS)
def test_pipe__in_place_of_a_file_is_refused_at_once(what: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        if what != "data, a folder" or path is pipe:
            with pytest.raises(MoecastError, match=f"{path}.*(pipe|no such file)"):
                READERS[what](path)


@pytest.mark.parametrize("what", READERS)
def test_placeholder__of_a_file_is_named(what: str, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 9\n")
    with pytest.raises(MoecastError, match=f"{path} is a Git LFS pointer.*git lfs pull"):
        READERS[what](path)
    path.unlink()
    path.symlink_to("lost.txt")
    with pytest.raises(MoecastError, match=f"{path} is a link to lost.txt, which is not there"):
        READERS[what](path)


@pytest.mark.parametrize("what", ["--config", "key", "data, one file", "data, a folder"])
@pytest.mark.parametrize("content", [b"\x89PNG\r\n", b"caf\xe9", "text".encode("utf-16"), b"a\0b"])
def test_text__in_no_or_another_encoding_is_refused(what, content, tmp_path) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    with pytest.raises(MoecastError, match=f"{path}.* is not text"):
        READERS[what](path)


DAMAGED = [
    (b"{", "{path}, line 2 is not JSON "),
    (b'"\xff"', "{path}, line 2 cannot be read as JSON: 'utf-8' codec"),
    (b"[" * 5000, "{path}, line 2 cannot be read as JSON: maximum recursion depth"),
    (b"9" * 5000, "{path}, line 2 cannot be read as JSON: Exceeds the limit"),
    (b"[" * 900 + b"]" * 900, "data=pydocs contains no text of at least 1000 characters: "),
]


@pytest.mark.parametrize(("line", "reason"), DAMAGED)
def test_json_lines__of_any_damage_name_the_line(line: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"text": "A long enough text"}\n{"text": ' + line + b"}\n")
    with pytest.raises(MoecastError, match=f"^{reason.format(path=path)}"):
        load_prompts(DataConfig(kind=SourceKind.JSONL, path=str(path), min_chars=1000))


def test_commands_in_messages__are_quoted_for_the_shell(tmp_path, capsys, monkeypatch) -> None:
    """Each is copied into a shell."""
    monkeypatch.chdir(tmp_path)
    folder, store, dense, larger = (tmp_path / name for name in ("it's mine", "a b", "$c", "d;e"))
    tiny_qwen2_moe(folder)
    run_program("runtime", ["pack", str(folder), f"output={store}", f"dense_output={dense}"])
    run_program("runtime", ["inflate", str(folder), f"output={larger}", "expert_size=64KiB"])
    said = " ".join(capsys.readouterr().out.split())
    served = ["moecast", "serve", str(dense), f"store.path={store}"]
    assert shlex.split(said.rpartition("without the checkpoint: ")[2])[:4] == served
    assert shlex.join([f"model.name={folder.name}", f"model.id={larger}"]) in said
    (store / "manifest.json").write_text("")
    with pytest.raises(MoecastError) as caught:
        read_manifest(store)
    assert f"(moecast pack MODEL 'output={store}' overwrite=true, " in str(caught.value)
    model = ModelConfig(name=folder.name, id=str(folder))
    assert shlex.split(describe_choice(model)) == [str(folder)]
    assert describe_choice(replace(model, id="a=b/c")) == "model=a=b/c"
