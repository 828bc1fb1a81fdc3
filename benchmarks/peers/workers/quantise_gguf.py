"""llama.cpp's own quantiser: `python quantise_gguf.py SOURCE.gguf OUTPUT.gguf Q4_0|Q8_0`.

Its defaults decide on the types of embeddings, attention and output.
"""

import ctypes
import os
import sys

import llama_cpp


def main(source: str, output: str, kind: str) -> None:
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    settings.nthread = os.cpu_count() or 1
    failed = llama_cpp.llama_model_quantize(
        source.encode(), output.encode(), ctypes.byref(settings)
    )
    if failed:
        sys.exit(f"llama_model_quantize failed with {failed}")


if __name__ == "__main__":
    main(*sys.argv[1:])
