"""Bounds what parsing an ONNX file takes, by the wire format of protocol buffers.

A message of two bytes becomes an object of a hundred: 64 MiB of empty operators took 5 GB.
"""

from predictors.errors import PredictorError

MAX_STRUCTURE_BYTES = 1 << 20
"""All but the raw numbers of tensors; exported graphs have some kilobytes, and scales."""
RAW_DATA = (7, 5, 9)
"""Numbers of the fields `ModelProto.graph`, `GraphProto.initializer`, `TensorProto.raw_data`."""
VARINT, BYTES = 0, 2
FIXED_SIZES = {1: 8, 5: 4}


def measure_structure(data: bytes | memoryview, path: tuple[int, ...] = RAW_DATA) -> int:
    """Returns how many bytes a message has without the fields at `path`.

    Raises:
        PredictorError: They are over `MAX_STRUCTURE_BYTES`, or no message.
    """
    structure = position = 0
    data = memoryview(data)
    while position < len(data):
        start = position
        key, position = _read_varint(data, position)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            _, position = _read_varint(data, position)
        elif kind == BYTES:
            size, first = _read_varint(data, position)
            position = first + size
        elif kind in FIXED_SIZES:
            position += FIXED_SIZES[kind]
        else:
            raise PredictorError(f"the network is not an ONNX model (byte {start} of a message)")
        structure += position - start
        if kind == BYTES and number == path[0]:
            inner = data[first:position]
            structure -= size - (measure_structure(inner, path[1:]) if path[1:] else 0)
        if structure > MAX_STRUCTURE_BYTES:
            raise PredictorError(
                f"the graph of a network has over {MAX_STRUCTURE_BYTES:,} bytes besides its weights"
            )
    return structure


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """Returns an integer and the position after it."""
    value = 0
    for place, byte in enumerate(data[position : position + 10]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, position + place + 1
    raise PredictorError("the network is not an ONNX model: it ends within a number")
