"""The origins of committed results: which are not of committed code, and which older than it."""

import ast
import re
import subprocess
from functools import cache

from benchmarks.process import ROOT
from benchmarks.reports import print_line, read_document
from predictors.origin import read_git_revision
from runtime.sim.hardware import LATENCY_FILE
from runtime.tools.report.provenance import REVISION_CHARACTERS, Provenance

LIVE = ("runtime :!runtime/serving :!runtime/generation/grammar_check.py", "predictors")
"""Code that live runs go through, whose answers have no grammar, and the machine's measurement for
replays next to them."""
UNPROFILED = (f"{LIVE[0]} :!runtime/profiling/local.py", "predictors")
"""Code of live runs alone."""
CORE = ("runtime/policy", "runtime/sim", "runtime/transfer/loop.py")
REPLAYS = (*CORE, "runtime/presets.py", "predictors")
"""Code that replays on simulated machines go through."""
PROFILED = ("klotski", "real_size", "validate")
SERVED = (
    *("control_plane", "drafts", "drafts_resident", "formats", "lockstep", "payoff", "peers"),
    *("prefill", "quantised"),
)
REPLAYED = ("lookahead", "lookahead_published", "moecast", "papers", "routing")


def own_code(name: str) -> str:
    """Returns the benchmark of a result, a file or a folder, as git matches paths."""
    return f"benchmarks/{name.split('_')[0]}*"


CODE = {
    **{name: (*UNPROFILED, own_code(name)) for name in SERVED},
    **{name: (*LIVE, own_code(name)) for name in PROFILED},
    **{name: (*REPLAYS, own_code(name)) for name in REPLAYED},
    "bench": LIVE,
    "capacity": ("collect", "train", *REPLAYS, own_code("capacity")),
    "dequantise": ("runtime/store", own_code("dequantise")),
    "evaluate": ("train/evaluate", *REPLAYS),
    "predictor_latency": ("predictors", own_code("latency")),
    "serving": ("runtime", "predictors", own_code("serving")),
    "scaling": (*REPLAYS, own_code("papers"), own_code("cluster")),
    "train": ("train", "predictors"),
}
"""Each result, and the folders and files of code that its figures depend on, as git takes paths."""
NO_CODE = (":!*.md", ":!*.pyi", ":!predictors/origin.py")
"""Files that no figure depends on, as git leaves them out: the last one reads the revision."""


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
            counts = {path.split()[0]: count_changed_files(revision, path) for path in code}
            changed = ", ".join(f"{path}: {count}" for path, count in counts.items() if count)
            since = f"files of code changed since {what} ({revision[:REVISION_CHARACTERS]})"
            if None in counts.values():
                print_line(f"{since} are not known: this checkout does not have it")
            elif changed:
                print_line(f"{since}: {changed}")


@cache
def count_changed_files(revision: str, path: str) -> int | None:
    """Returns the number of a path's files whose code differs from that of an older revision.

    Comments, docstrings and pages are no code, nor is what reads the revision itself. None for an
    unknown revision.
    """
    files = git("diff", "--name-only", revision, "HEAD", "--", *path.split(), *NO_CODE)
    if files is None:
        return None
    return sum(read_code(revision, file) != read_code("HEAD", file) for file in files.splitlines())


def read_code(revision: str, file: str) -> str | None:
    """Returns a file of a revision, Python and C without comments; None if it is not there."""
    text = git("show", f"{revision}:{file}")
    if text is None or not file.endswith((".py", ".c", ".h")):
        return text
    if not file.endswith(".py"):
        return re.sub(r"(/\*.*?\*/|\s)+", " ", text, flags=re.DOTALL)
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [
                part
                for part in node.body
                if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            ]
    return ast.dump(tree)


def git(*words: str) -> str | None:
    """Returns the output of a git command in this checkout; None if it fails."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else None
