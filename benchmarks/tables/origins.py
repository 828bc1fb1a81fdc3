"""The origins of committed results: which are not of committed code, and which older than it."""

import subprocess

from benchmarks.process import ROOT
from benchmarks.reports import print_line, read_document
from predictors.origin import read_git_revision
from runtime.sim.hardware import LATENCY_FILE
from runtime.tools.report.provenance import REVISION_CHARACTERS, Provenance

LIVE = ("runtime", "predictors")
"""Code that live runs go through."""
CORE = ("runtime/policy", "runtime/sim", "runtime/transfer/loop.py")
REPLAYS = (*CORE, "runtime/presets.py", "predictors")
"""Code that replays on simulated machines go through."""
CODE = {
    "bench": LIVE,
    "capacity": ("collect", "train", *REPLAYS, "benchmarks/capacity"),
    "control_plane": (*LIVE, "benchmarks/control_plane"),
    "dequantise": ("runtime/store", "benchmarks/dequantise.py"),
    "drafts": (*LIVE, "benchmarks/drafts.py"),
    "drafts_resident": (*LIVE, "benchmarks/drafts.py"),
    "evaluate": ("train/evaluate", *REPLAYS),
    "formats": (*LIVE, "benchmarks/formats.py"),
    "klotski": (*LIVE, "benchmarks/klotski"),
    "lockstep": (*LIVE, "benchmarks/lockstep.py"),
    "lookahead": (*REPLAYS, "benchmarks/lookahead.py"),
    "lookahead_published": (*REPLAYS, "benchmarks/lookahead.py"),
    "moecast": (*REPLAYS, "benchmarks/moecast.py"),
    "papers": (*REPLAYS, "benchmarks/papers"),
    "payoff": (*LIVE, "benchmarks/payoff.py"),
    "peers": (*LIVE, "benchmarks/peers"),
    "peers_avx2": (*LIVE, "benchmarks/peers"),
    "predictor_latency": ("predictors", "benchmarks/latency.py"),
    "prefill": (*LIVE, "benchmarks/prefill.py"),
    "quantised": (*LIVE, "benchmarks/quantised.py"),
    "real_size": (*LIVE, "benchmarks/real_size"),
    "routing": (*REPLAYS, "benchmarks/routing.py"),
    "scaling": (*REPLAYS, "benchmarks/papers", "benchmarks/cluster.py"),
    "serving": (*LIVE, "benchmarks/serving"),
    "train": ("train", "predictors"),
    "validate": (*LIVE, "benchmarks/validate.py"),
}
"""Each result, and the folders and files of code that its figures depend on."""


def list_origins(name: str) -> dict[str, Provenance]:
    """Returns the origin of a result, or of each of its parts, by the name to show."""
    document = read_document(LATENCY_FILE if name == LATENCY_FILE.stem else name)
    parts = (
        {name: document}
        if "origin" in document
        else {f"{name}, {part}": content for part, content in document.items()}
    )
    unknown = {"command": "a command that was not recorded"}
    return {what: Provenance(**part.get("origin", unknown)) for what, part in parts.items()}


def clean_revision(origin: Provenance) -> str | None:
    """Returns the commit that has the code which measured a result; None if there is none."""
    revision = origin.revision or "-dirty"
    return None if revision.endswith("-dirty") else revision


def refuse_unclean() -> list[str]:
    """Returns the results, or those with a part, that are not clean, after a line on each."""
    refused = []
    for name in CODE:
        for what, origin in list_origins(name).items():
            if clean_revision(origin) is None:
                why = "without a revision" if origin.revision is None else "with uncommitted code"
                print_line(f"refused: {what}: measured {why}; again: {origin.command}")
                refused.append(name)
    return list(dict.fromkeys(refused))


def warn_of_changes() -> None:
    """Writes a line on each result whose code has changed since it was measured."""
    if read_git_revision() is None:
        print_line("not a git checkout: whether results are older than their code is not known")
        return
    for name, code in CODE.items():
        for what, origin in list_origins(name).items():
            revision = clean_revision(origin)
            if revision is None:
                continue
            counts = {path: count_commits(revision, path) for path in code}
            changed = ", ".join(f"{path}: {count}" for path, count in counts.items() if count)
            since = f"commits since {what} ({revision[:REVISION_CHARACTERS]})"
            if None in counts.values():
                print_line(f"{since} are not known: this checkout does not have it")
            elif changed:
                print_line(f"{since} that changed {changed}")


def count_commits(revision: str, path: str) -> int | None:
    """Returns the number of commits since that changed a path; None for an unknown revision."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-list", "--count", f"{revision}..HEAD", "--", path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return int(done.stdout) if done.returncode == 0 else None
