"""Models in the Hub's cache, also in states in which its client does not find them."""

import shutil

import pytest
from huggingface_hub import constants

from runtime.config import ModelConfig
from runtime.store.hub_snapshot import find_snapshot
from runtime.store.model_source import identity
from tests.unit.runtime.store.test_model_check import MOE, refusal, write_model

COMMITS = ["1f3a" + "0" * 36, "27bc" + "1" * 36]


@pytest.fixture
def cached(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Return the cached repository of org/model with two snapshots; main is the first."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--model"
    for commit in COMMITS:
        write_model(repository / "snapshots" / commit, MOE)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMITS[0])
    return repository


def find(revision=None, **options):
    return find_snapshot(ModelConfig(name="model", id="org/model", revision=revision, **options))


@pytest.mark.parametrize("text", ["{}\n", "{}\r\n", " {}"])
def test_find_snapshot__reads_a_ref_that_an_editor_wrote_also_offline(text, cached, monkeypatch):
    (cached / "refs/main").write_text(text.format(COMMITS[1]))
    assert find().name == find("main").name == COMMITS[1]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find(local_only=False).name == COMMITS[1]


def test_find_snapshot__knows_a_commit_by_its_beginning(cached):
    assert find(COMMITS[1][:7]).name == find(COMMITS[1]).name == COMMITS[1]
    model = ModelConfig(name="model", id="org/model", revision=COMMITS[1][:7])
    assert identity(find(COMMITS[1][:7]), model)["revision"] == COMMITS[1]


def test_find_snapshot__without_refs_takes_the_only_one(cached):
    (cached / "refs/main").unlink()
    assert f"which snapshot is revision 'main'; it has {', '.join(COMMITS)}" in refusal("org/model")
    shutil.rmtree(cached / "snapshots" / COMMITS[1])
    assert find().name == COMMITS[0]
    assert "revision 'v1'" in refusal("org/model", revision="v1")


def test_find_snapshot__names_what_is_there_in_place_of_a_lost_snapshot(cached):
    (cached / "refs/main").write_text("f" * 40)
    assert "Choose one with model.revision=COMMIT" in refusal("org/model")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_resolve__names_the_link_whose_blob_is_gone(name, cached):
    file = cached / "snapshots" / COMMITS[0] / name
    file.unlink(missing_ok=True)
    file.symlink_to("../../blobs/lost")
    message = refusal("org/model")
    assert message.startswith(f"{file} is a link to ../../blobs/lost, which is not there")
    assert "model.local_only=false" in message
