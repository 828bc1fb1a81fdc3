"""ggml's library, its absence, and versions of it that are not read."""

from types import SimpleNamespace

import pytest
import torch

from runtime.store.ggml import library
from runtime.store.gguf.header import KINDS


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "MXFP4"])
def test_library__is_replaced_by_the_same_decoding(kind, monkeypatch):
    stored = library.encode_rows(kind, torch.randn(8, 64))
    usual = library.decode_rows(kind, stored)
    monkeypatch.setattr(library, "_open", lambda: (None, "it is not installed"))
    assert torch.equal(library.decode_rows(kind, stored), usual)
    assert not library.multiplies.__wrapped__(kind)


def test_library__has_every_type_that_files_may_have():
    assert set(KINDS) <= set(library.TYPES)
    assert library.find_products() is None or all(map(library.multiplies, KINDS))


def test_library__is_not_opened_on_processors_that_it_is_not_compiled_for(monkeypatch):
    pytest.importorskip("runtime.store.ggml.products")
    monkeypatch.setattr(library, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    reason = "this processor has no AVX2, for which libggml-python is compiled"
    assert library._open.__wrapped__() == (None, reason)


def test_library__of_another_series_is_not_used(monkeypatch):
    pytest.importorskip("libggml")
    pytest.importorskip("runtime.store.ggml.products")
    monkeypatch.setattr(library, "version", lambda _: "0.99.0")
    reason = "libggml-python has the version 0.99.0, and 0.20.* is read"
    assert library._open.__wrapped__() == (None, reason)


def test_library__must_have_types_as_files_have_them():
    fake = SimpleNamespace(describe=lambda _: ("q4_0", 32, 20, True, True, True))
    assert not library._agrees(fake, library.TYPES["Q4_0"])
    assert library._agrees(SimpleNamespace(describe=lambda _: None), library.TYPES["Q4_0"])
