"""Splits GGUF files into parts, as llama-gguf-split does."""

import struct
from pathlib import Path

import gguf

HEADER_BYTES = 24
"""Magic, version, and the numbers of tensors and values."""
ALIGNMENT = 32


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def split_gguf(file: Path, folder: Path, num_parts: int) -> list[Path]:
    """Write the parts: all metadata are in the first, the tensors in all, in order."""
    reader, raw = gguf.GGUFReader(file), file.read_bytes()
    values = raw[HEADER_BYTES : reader.tensors[0].field.offset]
    (num_values,) = struct.unpack_from("<Q", raw, 16)
    size = -(-len(reader.tensors) // num_parts)
    paths = []
    for number in range(num_parts):
        split = b"".join(
            text(key) + struct.pack(f"<I{form}", kind, value)
            for key, kind, form, value in (
                ("split.no", 2, "H", number),
                ("split.count", 2, "H", num_parts),
                ("split.tensors.count", 5, "i", len(reader.tensors)),
            )
        )
        entries, data = b"", b""
        tensors = reader.tensors[number * size : (number + 1) * size]
        for tensor in tensors:
            sizes = [int(size) for size in tensor.shape]
            entries += text(tensor.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
            entries += struct.pack("<IQ", tensor.tensor_type, len(data))
            data += tensor.data.tobytes()
            data += bytes(-len(data) % ALIGNMENT)
        own, count = (values, num_values) if number == 0 else (b"", 0)
        head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), count + 3) + own + split + entries
        path = folder / f"{file.stem}-{number + 1:05}-of-{num_parts:05}.gguf"
        path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)
        paths.append(path)
    return paths
