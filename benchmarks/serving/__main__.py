"""The server's benchmarks one after another, all but the soak.

    python -m benchmarks.serving trace=AzureLLMInferenceTrace_conv.csv model=runs/inflated

Without a `trace` the arrivals are left out; each part's own help says what it does and takes. The
soak (`python -m benchmarks.serving.soak`) takes twenty minutes and measures no time.
"""

import importlib
import sys

from benchmarks.serving.results import OUTPUT

PARTS = ("storm", "shutdown", "queue", "fuzz", "disconnects", "clients")


def main(arguments: dict[str, str]) -> None:
    output = {"output": arguments.get("output", OUTPUT)}
    for name in PARTS:
        importlib.import_module(f"benchmarks.serving.{name}").main(output)
    if "trace" in arguments:
        importlib.import_module("benchmarks.serving.arrivals").main(arguments)


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
