"""Splits GGUF files into parts, as llama-gguf-split does."""

from pathlib import Path

import gguf


def split_gguf(file: Path, folder: Path, num_parts: int) -> list[Path]:
    """Write the parts: all metadata are in the first, the tensors in all, in order."""
    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    size = -(-len(reader.tensors) // num_parts)
    writer = gguf.GGUFWriter(folder / file.name, architecture, split_max_tensors=size)
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    write_files(writer)
    return sorted(folder.glob(f"{file.stem}-*-of-*.gguf"))


def write_files(writer: gguf.GGUFWriter) -> None:
    """Write the files of what was added, and close them."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
