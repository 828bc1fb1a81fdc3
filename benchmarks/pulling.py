"""What the zoo costs: pulling what is there, pulling 20 MB over the loopback, signing, verifying.

python -m benchmarks.pulling output=benchmarks/results/zoo.json
"""

import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from predictors.base import Signal
from predictors.spec import ModelSpec
from zoo.entry import open_entry, write_entry
from zoo.index import Reference
from zoo.load import pulled
from zoo.places import FolderPlace
from zoo.places.http import HttpPlace
from zoo.signing import check_signature, sign
from zoo.writing import WritableZoo

MEGABYTES = 20
FILES = 8
REPETITIONS = 5
NAME = "benchmark/token"


class Quiet(SimpleHTTPRequestHandler):
    """No line for each request."""

    def log_message(self, *_: object) -> None:
        pass


def make_entry(folder: Path) -> None:
    """Random tensors: what is in them does not matter here."""
    chance = np.random.default_rng(0)
    size = MEGABYTES * 1_000_000 // FILES // 4
    write_entry(
        folder,
        name=NAME,
        kind="token",
        options={},
        spec=ModelSpec(
            model_id="benchmark", revision="1", config_hash="0" * 64, num_layers=2,
            num_experts=8, top_k=2, hidden_size=4, dtype="float32",
        ),
        signals={Signal.TOKENS},
        files={
            f"part-{number}.safetensors": save({"w": chance.random(size, dtype=np.float32)})
            for number in range(FILES)
        },
        metrics={"held_out": {"accuracy": 0.5}},
        trace_digest="0" * 64,
        parity={},
    )  # fmt: skip


def make_keys(folder: Path) -> tuple[Path, Path]:
    """Private and public, in PEM."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / "key.pem", folder / "key.pub"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


def median_seconds(run: Callable[[int], object]) -> float:
    """Of `REPETITIONS`, each told its number."""
    times = []
    for number in range(REPETITIONS):
        started = time.perf_counter()
        run(number)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main(arguments: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_entry(folder / "entry")
        private, public = make_keys(folder)
        entry = open_entry(folder / "entry")
        figures = {
            "sign_seconds": median_seconds(lambda _: sign(folder / "entry", key=private)),
            "verify_signature_seconds": median_seconds(
                lambda _: check_signature(entry, key=public)
            ),
            "verify_digests_seconds": median_seconds(lambda _: entry.verify()),
        }
        WritableZoo(FolderPlace(folder / "zoo")).add(open_entry(folder / "entry"))
        server = ThreadingHTTPServer(
            ("127.0.0.1", 0), partial(Quiet, directory=str(folder / "zoo"))
        )
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = HttpPlace(f"http://127.0.0.1:{server.server_port}")

        def pull(number: int) -> None:
            os.environ["MOECAST_CACHE"] = str(folder / f"cache-{number}")
            pulled(place, Reference(NAME))

        figures["pull_seconds"] = median_seconds(pull)
        figures["pull_cached_seconds"] = median_seconds(pull)
        server.shutdown()
    report = {
        "megabytes": MEGABYTES,
        "repetitions": REPETITIONS,
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "seconds": {name: round(value, 4) for name, value in figures.items()},
    }
    Path(arguments["output"]).write_text(json.dumps(report, indent=1) + "\n")
    for name, value in figures.items():
        sys.stdout.write(f"{name}: {value:.3f}\n")


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
