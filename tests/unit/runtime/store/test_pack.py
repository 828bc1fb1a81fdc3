"""Packing: resumed wherever it ended, refused where it cannot end well, published whole."""

import errno
import fcntl
import itertools
import os
import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from runtime.commands import pack as command
from runtime.config import ModelConfig, PackConfig, Quantise
from runtime.errors import StoreError
from runtime.store.packed import writer
from runtime.store.packed.store import open_store
from runtime.store.packed.writer import pack
from tests.builders.models import tiny_qwen2_moe
from tests.builders.packed import flip_bit, pack_model, packed, plan

EXPERTS_OF_LAYER = 4
EXPERTS = 2 * EXPERTS_OF_LAYER


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_qwen2_moe(tmp_path_factory.mktemp("model"), num_experts=4)


@pytest.fixture
def planned(model):
    """The arguments of `pack` for the model."""
    return plan(model)


def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> dict[str, bytes]:
    """The model's store, packed without a stop."""
    return content(packed(model, tmp_path_factory.mktemp("whole") / "store"))


@contextmanager
def stopped_at(number: int, error: BaseException):
    """The n-th write is torn in its middle."""
    real, numbers = writer.write_whole, itertools.count()

    def torn(descriptor, data, position):
        if next(numbers) >= number:
            real(descriptor, data[: len(data) // 2], position)
            raise error
        real(descriptor, data, position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "write_whole", torn)
        yield


@pytest.mark.parametrize("number", range(EXPERTS))
def test_pack__torn_at_any_write_is_resumed(tmp_path, number, planned, whole):
    output = tmp_path / "store"
    with stopped_at(number, Killed()), pytest.raises(Killed):
        pack(*planned, output)
    assert not output.exists()
    advanced: list[int] = []
    done = pack(*planned, output, advance=advanced.append)
    kept = number // EXPERTS_OF_LAYER * EXPERTS_OF_LAYER
    assert (done.kept, done.written, sum(advanced)) == (kept, EXPERTS - kept, EXPERTS)
    assert content(output) == whole
    assert list(tmp_path.iterdir()) == [output]


def test_pack__verifies_what_an_interrupted_run_left(tmp_path, planned, whole):
    with stopped_at(EXPERTS - 1, Killed()), pytest.raises(Killed):
        pack(*planned, tmp_path / "store")
    (data,) = tmp_path.glob(".store.packing/*/store/layer-000.bin")
    flip_bit(data, 8 * (2 * len(whole["layer-000.bin"]) // 4 + 5))
    done = pack(*planned, tmp_path / "store")
    assert (done.kept, done.written) == (0, EXPERTS)
    assert content(tmp_path / "store") == whole


def test_pack__a_run_for_another_model_begins_anew(tmp_path, planned, whole):
    other = plan(tiny_qwen2_moe(tmp_path / "other", num_experts=4, seed=5))
    with stopped_at(6, Killed()), pytest.raises(Killed):
        pack(*other, tmp_path / "store")
    assert pack(*planned, tmp_path / "store").written == EXPERTS
    assert content(tmp_path / "store") == whole


def test_pack__a_complete_store_is_verified_and_left(tmp_path, model, planned):
    output = packed(model, tmp_path / "store")
    done = pack(*planned, output)
    assert (done.kept, done.written) == (EXPERTS, 0)
    flip_bit(output / "layer-001.bin", 0)
    with pytest.raises(StoreError, match=r"is damaged: .*layer 1, expert 0.*overwrite=true"):
        pack(*planned, output)
    assert pack(*planned, output, overwrite=True).written == EXPERTS
    assert pack(*planned, output).kept == EXPERTS


def test_pack__another_store_is_replaced_only_with_overwrite(tmp_path, planned, whole):
    other = tiny_qwen2_moe(tmp_path / "other", num_layers=3, num_experts=4, seed=5)
    output = packed(other, tmp_path / "store")
    before = content(output)
    message = r"store of tiny .* in float32 .*, not of tiny .* in float32 .* overwrite=true"
    with pytest.raises(StoreError, match=message):
        pack(*planned, output)
    assert content(output) == before
    pack(*planned, output, overwrite=True)
    assert content(output) == whole


@pytest.mark.parametrize("overwrite", [False, True])
def test_pack__a_folder_that_is_no_store_is_never_touched(tmp_path, planned, overwrite):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("the only copy")
    with pytest.raises(StoreError, match="is no packed store; choose another"):
        pack(*planned, tmp_path / "mine", overwrite=overwrite)
    assert content(tmp_path / "mine") == {"thesis.tex": b"the only copy"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_pack__a_full_disk_leaves_the_store_and_says_what_to_do(tmp_path, model, number, planned):
    output = packed(model, tmp_path / "store")
    before = content(output)
    is_named = pytest.raises(StoreError, match=r"disk is full .*packing; 65536 bytes")
    with stopped_at(5, OSError(number, "No space")), is_named:
        pack(*planned, output, overwrite=True)
    assert content(output) == before
    assert pack(*planned, output, overwrite=True).kept == EXPERTS_OF_LAYER


def test_pack__without_room_says_how_many_bytes_and_writes_none(tmp_path, planned, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(StoreError, match=r"no room .*: \d{8} bytes are needed, .* has 1000 free"):
        pack(*planned, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_pack__two_at_once_are_one_too_many(tmp_path, planned):
    def second(_: int) -> None:
        with pytest.raises(StoreError, match="another process is packing"):
            pack(*planned, tmp_path / "store")

    pack(*planned, tmp_path / "store", advance=second)
    open_store(tmp_path / "store", None).close()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("module", [fcntl, os])
def test_pack__another_run_may_end_before_the_lock_is_got(
    tmp_path, planned, overwrite, module, monkeypatch
):
    output, name = tmp_path / "store", "flock" if module is fcntl else "open"
    call = getattr(module, name)

    def call_late(target, *arguments, **options):
        if module is fcntl or str(target).endswith(".packing"):
            monkeypatch.setattr(module, name, call)
            pack(*planned, output)
        return call(target, *arguments, **options)

    def second(_: int) -> None:
        if overwrite:
            with pytest.raises(StoreError, match="another process is packing"):
                pack(*planned, output, overwrite=True)

    monkeypatch.setattr(module, name, call_late)
    done = pack(*planned, output, overwrite=overwrite, advance=second)
    assert done.written == (EXPERTS if overwrite else 0)


def test_pack__verifying_a_store_leaves_the_work_of_another_run(tmp_path, model, planned):
    output = packed(model, tmp_path / "store")
    other = plan(tiny_qwen2_moe(tmp_path / "other", num_experts=4, seed=5))

    def verify(_: int) -> None:
        assert pack(*planned, output).kept == EXPERTS

    with stopped_at(EXPERTS - 1, Killed()), pytest.raises(Killed):
        pack(*other, output, overwrite=True, advance=verify)
    verify(0)
    assert pack(*other, output, overwrite=True).kept == EXPERTS_OF_LAYER


def test_pack__a_folder_that_vanishes_is_named(tmp_path, planned):
    def remove(_: int) -> None:
        shutil.rmtree(tmp_path / ".store.packing", ignore_errors=True)

    with pytest.raises(StoreError, match="packing.* was removed while .* the same command again"):
        pack(*planned, tmp_path / "store", advance=remove)


def test_command__packs_and_reports(tmp_path, model):
    config = PackConfig(model=ModelConfig(name="tiny", id=str(model)), output=tmp_path / "store")
    result = command.run(config)
    assert (result["experts_written"], result["num_experts"]) == (EXPERTS, EXPERTS)
    assert result["packed_bytes"] == sum(f.stat().st_size for f in config.output.glob("layer-*"))
    assert command.run(config)["experts_verified"] == EXPERTS


def test_command__groups_that_divide_nothing_are_refused(tmp_path, model):
    message = "rows of down_proj, gate_up_proj are no multiple of 1000 weights"
    with pytest.raises(StoreError, match=message):
        pack_model(model, tmp_path / "store", quantise=Quantise.HQQ, group_size=1000)
