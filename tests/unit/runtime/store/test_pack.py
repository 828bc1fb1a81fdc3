"""Packing: resumed wherever it ended, refused where it cannot end well, published whole."""

import errno
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from runtime.commands import pack as command
from runtime.config import ModelConfig, PackConfig, Quantise
from runtime.errors import StoreError
from runtime.store.packed import writer
from runtime.store.packed.store import open_store
from runtime.store.packed.writer import pack
from tests.builders.models import tiny_qwen2_moe
from tests.builders.packed import packed, plan

EXPERTS_OF_LAYER = 4
EXPERTS = 2 * EXPERTS_OF_LAYER


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_qwen2_moe(tmp_path_factory.mktemp("model"), num_experts=4)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def stop_at(number: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th write is torn in its middle."""
    real, left = writer.write_whole, number

    def torn(descriptor, data, position):
        nonlocal left
        if not left:
            real(descriptor, data[: len(data) // 2], position)
            raise error
        left -= 1
        real(descriptor, data, position)

    monkeypatch.setattr(writer, "write_whole", torn)


@pytest.mark.parametrize("number", range(EXPERTS))
def test_pack__torn_at_any_write_is_resumed(tmp_path, model, monkeypatch, number):
    whole = content(packed(model, tmp_path / "whole"))
    output = tmp_path / "store"
    source, contents = plan(model)
    with monkeypatch.context() as patch:
        stop_at(number, Killed(), patch)
        with pytest.raises(Killed):
            pack(source, contents, output)
    assert not output.exists()
    advanced: list[int] = []
    done = pack(source, contents, output, advance=advanced.append)
    kept = number // EXPERTS_OF_LAYER * EXPERTS_OF_LAYER
    assert (done.kept, done.written) == (kept, EXPERTS - kept)
    assert sum(advanced) == EXPERTS
    assert content(output) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "whole"]


def test_pack__verifies_what_an_interrupted_run_left(tmp_path, model, monkeypatch):
    whole = content(packed(model, tmp_path / "whole"))
    source, contents = plan(model)
    with monkeypatch.context() as patch:
        stop_at(EXPERTS - 1, Killed(), patch)
        with pytest.raises(Killed):
            pack(source, contents, tmp_path / "store")
    (data,) = tmp_path.glob(".store.packing/*/store/layer-000.bin")
    with data.open("r+b") as file:
        file.seek(2 * len(whole["layer-000.bin"]) // 4 + 5)
        file.write(b"\xaa")
    done = pack(source, contents, tmp_path / "store")
    assert (done.kept, done.written) == (0, EXPERTS)
    assert content(tmp_path / "store") == whole


def test_pack__a_run_for_another_model_begins_anew(tmp_path, model, monkeypatch):
    source, contents = plan(tiny_qwen2_moe(tmp_path / "other", num_experts=4, seed=5))
    with monkeypatch.context() as patch:
        stop_at(6, Killed(), patch)
        with pytest.raises(Killed):
            pack(source, contents, tmp_path / "store")
    source, contents = plan(model)
    assert pack(source, contents, tmp_path / "store").written == EXPERTS
    assert content(tmp_path / "store") == content(packed(model, tmp_path / "whole"))


def test_pack__a_complete_store_is_verified_and_left(tmp_path, model):
    output = packed(model, tmp_path / "store")
    source, contents = plan(model)
    done = pack(source, contents, output)
    assert (done.kept, done.written) == (EXPERTS, 0)
    with (output / "layer-001.bin").open("r+b") as file:
        file.write(b"\xaa")
    with pytest.raises(StoreError, match=r"is damaged: .*layer 1, expert 0.*overwrite=true"):
        pack(source, contents, output)
    assert pack(source, contents, output, overwrite=True).written == EXPERTS
    assert pack(source, contents, output).kept == EXPERTS


def test_pack__another_store_is_replaced_only_with_overwrite(tmp_path, model):
    other = tiny_qwen2_moe(tmp_path / "other", num_layers=3, num_experts=4, seed=5)
    output = packed(other, tmp_path / "store")
    before = content(output)
    source, contents = plan(model)
    with pytest.raises(StoreError, match=r"is a packed store of tiny .* overwrite=true"):
        pack(source, contents, output)
    assert content(output) == before
    pack(source, contents, output, overwrite=True)
    assert content(output) == content(packed(model, tmp_path / "whole"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_pack__a_folder_that_is_no_store_is_never_touched(tmp_path, model, overwrite):
    source, contents = plan(model)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("the only copy")
    with pytest.raises(StoreError, match="is no packed store; choose another"):
        pack(source, contents, tmp_path / "mine", overwrite=overwrite)
    assert content(tmp_path / "mine") == {"thesis.tex": b"the only copy"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_pack__a_full_disk_leaves_the_store_and_says_what_to_do(
    tmp_path, model, monkeypatch, number
):
    output = packed(model, tmp_path / "store")
    before = content(output)
    source, contents = plan(model)
    with monkeypatch.context() as patch:
        stop_at(5, OSError(number, "No space"), patch)
        with pytest.raises(StoreError, match=r"disk is full .*packing; 65536 bytes"):
            pack(source, contents, output, overwrite=True)
    assert content(output) == before
    assert pack(source, contents, output, overwrite=True).kept == EXPERTS_OF_LAYER


def test_pack__without_room_says_how_many_bytes_and_writes_none(tmp_path, model, monkeypatch):
    source, contents = plan(model)
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(StoreError, match=r"no room .*: \d{8} bytes are needed, .* has 1000 free"):
        pack(source, contents, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_pack__two_at_once_are_one_too_many(tmp_path, model):
    source, contents = plan(model)

    def second(_: int) -> None:
        with pytest.raises(StoreError, match="another process is packing"):
            pack(source, contents, tmp_path / "store")

    pack(source, contents, tmp_path / "store", advance=second)
    open_store(tmp_path / "store", None).close()


def test_command__packs_and_reports(tmp_path, model):
    config = PackConfig(model=ModelConfig(name="tiny", id=str(model)), output=tmp_path / "store")
    result = command.run(config)
    assert (result["experts_written"], result["num_experts"]) == (EXPERTS, EXPERTS)
    assert result["packed_bytes"] == sum(f.stat().st_size for f in config.output.glob("layer-*"))
    assert command.run(config)["experts_verified"] == EXPERTS


def test_command__groups_that_divide_nothing_are_refused(tmp_path, model):
    config = PackConfig(
        model=ModelConfig(name="tiny", id=str(model)),
        output=tmp_path / "store",
        quantise=Quantise.HQQ,
        group_size=1000,
    )
    with pytest.raises(
        StoreError, match="rows of down_proj, gate_up_proj are no multiple of 1000 weights"
    ):
        command.run(config)
