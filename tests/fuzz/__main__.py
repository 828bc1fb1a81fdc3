"""Fuzzes one target with atheris: `python -m tests.fuzz TARGET [SECONDS] [NEW_INPUTS_FOLDER]`.

A fault ends it with exit code 77 and leaves the input in a file, which the last line names.
"""

import random
import sys
import tempfile
from pathlib import Path

PACKAGES = ["predictors", "zoo", "collect", "runtime", "configs"]
SLOWER = 5.0
"""Instrumented code takes several times as long."""
MOST_MEGABYTES = 4096


def main(argv: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=PACKAGES):
        from tests.fuzz.mutation import mutate
        from tests.fuzz.registry import TARGETS
    from tests.fuzz.target import MAX_SECONDS

    name, seconds = argv[0], int(argv[1]) if len(argv) > 1 else 60
    if name not in TARGETS:
        sys.exit(f"unknown target {name!r}; choose {', '.join(TARGETS)}")
    target = TARGETS[name]
    corpus = target.corpus()
    found = Path(argv[2]) if len(argv) > 2 else Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    found.mkdir(parents=True, exist_ok=True)

    sys.stderr.write(f"new inputs: {found}\n")

    def check(data: bytes) -> None:
        target.check(data, max_seconds=SLOWER * MAX_SECONDS)

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        """Mutates values as often as bytes, which libFuzzer does better."""
        rng = random.Random(seed)
        changed = mutate(data, rng, corpus) if rng.random() < 0.5 else b""
        return changed[:max_size] or atheris.Mutate(data, max_size)

    options = [f"-max_total_time={seconds}", "-timeout=60", f"-rss_limit_mb={MOST_MEGABYTES}"]
    options += ["-max_len=65536", "-len_control=0", "-print_final_stats=1"]
    options += [f"-artifact_prefix={found}/fault-", str(found), str(target.folder)]
    atheris.Setup([sys.argv[0], *options], check, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
