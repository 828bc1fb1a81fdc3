"""The worker process of a peer: the same prompts, clocks and report for all.

Each `with_*.py` of this folder runs in the environment of its peer, without moecast. This module,
which they share, needs the standard library only.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

OnToken = Callable[[int], bool]
"""Called with each new token; False ends the answer."""
AnswerFunction = Callable[[list[int], int, OnToken], None]
"""Continues a prompt greedily by at most that many tokens."""


@dataclass
class PeerRequest:
    weights: str
    """File or folder, in the layout that this peer reads."""
    store: str | None
    """This project's packed store of the experts."""
    dtype: str
    """Dtype of activations, and of weights that are not quantised."""
    warm_up: list[list[int]]
    """Prompts before the measured ones, with one new token each."""
    prompts: list[list[int]]
    new_tokens: int
    seconds_per_prompt: float
    """An answer that takes longer ends early, after `MIN_TOKENS` or more."""
    threads: int
    budget_bytes: int
    """Memory for experts."""
    experts_bytes: int
    other_bytes: int
    """Weights other than experts."""
    scratch: str
    """Folder for the peer's own files."""
    options: dict[str, str] = field(default_factory=dict)


@dataclass
class TimedAnswer:
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Time of each token since the prompt."""
    read_bytes: list[int] = field(default_factory=list)
    """Bytes read from the disk since the prompt, at each token."""


MIN_TOKENS = 3
"""The first is prefill; two more give a time per token."""


def read_bytes() -> int:
    """Returns the bytes that this process has read from the disk: mapped, buffered and direct."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise OSError("/proc/self/io has no read_bytes")


def peak_resident_bytes() -> int:
    """Returns the peak of resident memory, mapped files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def package_versions(packages: tuple[str, ...]) -> dict[str, str]:
    return {name: version(name) for name in packages}


def time_answer(answer: AnswerFunction, request: PeerRequest, prompt: list[int]) -> TimedAnswer:
    """Answers one prompt, timed token by token."""
    timed = TimedAnswer()
    before, start = read_bytes(), time.perf_counter()

    def on_token(token: int) -> bool:
        timed.seconds.append(time.perf_counter() - start)
        timed.read_bytes.append(read_bytes() - before)
        timed.tokens.append(token)
        enough = len(timed.tokens) >= MIN_TOKENS
        return not (enough and timed.seconds[-1] > request.seconds_per_prompt)

    answer(prompt, request.new_tokens, on_token)
    return timed


def main(load: Callable[[PeerRequest], AnswerFunction], packages: tuple[str, ...]) -> None:
    """Runs `python with_PEER.py REQUEST.json REPORT.json`; a failure ends in a traceback."""
    request = PeerRequest(**json.loads(Path(sys.argv[1]).read_text()))
    os.environ["OMP_NUM_THREADS"] = str(request.threads)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    start = time.perf_counter()
    answer = load(request)
    load_seconds, load_read_bytes = time.perf_counter() - start, read_bytes()
    for prompt in request.warm_up:
        answer(prompt, 1, lambda _: False)
    answers = [time_answer(answer, request, prompt) for prompt in request.prompts]
    report = {
        "versions": package_versions(packages),
        "load_seconds": load_seconds,
        "load_read_bytes": load_read_bytes,
        "peak_resident_bytes": peak_resident_bytes(),
        "answers": [asdict(timed) for timed in answers],
    }
    Path(sys.argv[2]).write_text(json.dumps(report))
