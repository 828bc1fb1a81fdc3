import struct
import time

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from runtime.errors import CheckpointError
from runtime.store.gguf import header as header_module
from runtime.store.gguf.header import check_gguf, read_header
from tests.builders.gguf_files import FILES, gguf_file
from tests.builders.gguf_files.parts import write_files
from tests.builders.processes import run_python

SMALL = gguf_file("qwen2moe-Q4_0")
LARGE = 1 << 60


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(name: str, sizes: tuple[int, ...], *, kind: int = 0, offset: int = 0) -> bytes:
    numbers = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + numbers + struct.pack("<IQ", kind, offset)


NAMED = pair("general.architecture", 8, text("qwen2moe"))


def content(*, version=3, tensors=0, values=1, body=NAMED, data=4096) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + body + bytes(data)


def strings(number: int) -> bytes:
    return struct.pack("<IQ", 8, number)


def tensors(*entries: bytes) -> bytes:
    return content(tensors=len(entries), body=NAMED + b"".join(entries))


VALUES = NAMED + pair("a", 7, b"?") * (10**6 - 1)
NAMES = NAMED + entry("a", (8,)) * 10**6
UNALIGNED = NAMED + pair("general.alignment", 4, bytes(4))
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated: it ends at byte 0, inside its header"),
    "another magic": (b"GGML" + content()[4:], "is no GGUF file: it begins with b'GGML'"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + NAMED, "is a big-endian GGUF file"),
    "version 1": (content(version=1), "has version 1 of GGUF; versions 2 and 3 are read"),
    "many values": (content(values=LARGE, data=0), f"it claims 0 tensors and {LARGE} values"),
    "10**6 values": (content(values=10**6, body=VALUES), "it claims 0 tensors and 1000000 values"),
    "10**6 tensors": (content(tensors=10**6, body=NAMES), "it claims 1000000 tensors and 1 values"),
    "few values": (content(values=2, data=0), "inside its header"),
    "a long key": (content(body=struct.pack("<Q", LARGE)), "inside its header"),
    "many strings": (content(body=pair("a", 9, strings(LARGE)), data=800), "inside its header"),
    "an unknown value": (content(body=pair("a", 77, b"")), "a value of the unknown type 77"),
    "no UTF-8": (content(body=struct.pack("<Q", 2) + b"\xff\xfe"), "is no UTF-8"),
    "no architecture": (content(values=0, body=b""), "names no general.architecture"),
    "no alignment": (content(values=2, body=UNALIGNED), "general.alignment is 0"),
    "nine dimensions": (tensors(entry("a", (1,) * 9)), "a has 9 dimensions"),
    "half a block": (
        tensors(entry("a", (16, 2), kind=Kind.Q4_0)),
        "a is (2, 16), which are no blocks of Q4_0",
    ),
    "two of a name": (tensors(entry("a", (8,)), entry("a", (8,))), "it has two tensors a"),
    "beyond the end": (tensors(entry("a", (8,), offset=LARGE)), "a at byte 1152921504606847"),
    "larger than the file": (tensors(entry("a", (LARGE, 4))), "is truncated: it ends at byte"),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("case", DAMAGED)
def test_read_header__says_what_is_wrong_without_believing_any_count(tmp_path, case):
    data, message = DAMAGED[case]
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        read_header(file)
    assert message in str(error.value)
    assert str(file) in str(error.value)


def test_read_header__has_a_limit(tmp_path, monkeypatch):
    """The header of a large file may claim to fill all of it."""
    monkeypatch.setattr(header_module, "MAX_HEADER_BYTES", 1 << 10)
    file = tmp_path / "model.gguf"
    file.write_bytes(content(body=pair("a", 9, strings(LARGE))))
    with pytest.raises(CheckpointError, match="its header has more than 1024 bytes"):
        read_header(file)


def test_read_header__takes_no_time_where_every_string_is_empty(tmp_path):
    file, most = tmp_path / "model.gguf", header_module.MAX_HEADER_BYTES // 8
    file.write_bytes(content(body=pair("a", 9, strings(most)), data=8 * most))
    started = time.process_time()
    assert sum(1 for _ in range(most)) == most
    counted = time.process_time()
    with pytest.raises(CheckpointError, match="its header has more than"):
        read_header(file)
    assert time.process_time() - counted < 40 * (counted - started)


@pytest.mark.parametrize("name", FILES)
def test_read_header__finds_what_the_gguf_package_finds(name):
    header, reader = read_header(gguf_file(name)), gguf.GGUFReader(gguf_file(name))
    assert {t.name: (t.shape, t.kind, t.offset, t.num_bytes) for t in header.tensors.values()} == {
        t.name: (tuple(t.shape.tolist()[::-1]), t.tensor_type.name, t.data_offset, t.n_bytes)
        for t in reader.tensors
    }
    for key, field in reader.fields.items():
        value = field.contents()
        if isinstance(value, list):
            short = isinstance(value[0], int) and len(value) <= header_module.MAX_LAYERS
            value = tuple(value) if short else len(value)
        assert key.startswith("GGUF.") or header.metadata[key] == value


UP = "blk.0.ffn_up_exps.weight"
NO_EXPERTS = r"is not a Mixture-of-Experts model: its architecture 'llama'.* qwen3moe \(Qwen3-MoE\)"
OTHER_TYPE = rf"{UP} has the type Q8_1, which is not served \(F32, F16,"
CONVERSION = r".* llama-quantize --allow-requantize .* OUTPUT\.gguf Q4_K_M"
A_PART = r"is one of 3 parts of a model; give the first, .*\(NAME-00001-of-00003\.gguf\)"
REFUSED = [
    (("llama", "blk.0.ffn_up.weight"), NO_EXPERTS),
    (("grok", UP), "has the architecture 'grok', which is not served.* qwen3moe"),
    (("qwen3moe", UP, Kind.Q8_1), OTHER_TYPE + CONVERSION),
    (("qwen3moe", UP, Kind.Q4_0, 3), A_PART),
]


def write(file, architecture: str, tensor: str, kind: Kind = Kind.Q4_0, parts: int = 1) -> None:
    writer = gguf.GGUFWriter(file, architecture)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    shape = (2, 32, gguf.GGML_QUANT_SIZES[kind][1])
    writer.add_tensor(tensor, np.zeros(shape, dtype=np.uint8), raw_dtype=kind)
    write_files(writer)


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_check_gguf__names_what_is_served_and_what_converts(tmp_path, options, message):
    file = tmp_path / "model.gguf"
    write(file, *options)
    with pytest.raises(CheckpointError, match=message):
        check_gguf(file)


def test_check_gguf__imports_no_pytorch():
    code = (
        "import sys; from pathlib import Path; from runtime.store.gguf.header import check_gguf; "
        f"check_gguf(Path({str(SMALL)!r})); print({{'torch', 'transformers'}} & set(sys.modules))"
    )
    assert run_python("-c", code).stdout.strip() == "set()"
