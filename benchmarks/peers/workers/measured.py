"""One peer in a process of its own: the same questions, clocks and report for all.

Each `with_*.py` beside this file runs in the environment of its peer and knows nothing of moecast;
what they share is here, and needs the standard library only.
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
Answer = Callable[[list[int], int, OnToken], None]
"""Greedy continuation of a prompt by at most so many tokens."""


@dataclass
class Request:
    weights: str
    """File or folder, in the layout that this peer reads."""
    prompts: list[list[int]]
    new_tokens: int
    seconds_per_prompt: float
    """After this long an answer ends early; it has at least three tokens."""
    threads: int
    budget_bytes: int
    """Memory for experts."""
    scratch: str
    """Folder for files of the peer's own."""
    options: dict[str, str] = field(default_factory=dict)


@dataclass
class Answered:
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """From the question to each token."""
    read_bytes: list[int] = field(default_factory=list)
    """From the disk, from the question to each token."""


MIN_TOKENS = 3
"""The first is prefill; two more give a time per token."""


def read_bytes() -> int:
    """What this process has had the disk read so far: mapped, buffered and direct."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise OSError("/proc/self/io has no read_bytes")


def peak_resident_bytes() -> int:
    """Mapped files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def ask(answer: Answer, request: Request, prompt: list[int]) -> Answered:
    """One prompt, timed token by token."""
    answered = Answered()
    before, start = read_bytes(), time.perf_counter()

    def on_token(token: int) -> bool:
        answered.seconds.append(time.perf_counter() - start)
        answered.read_bytes.append(read_bytes() - before)
        answered.tokens.append(token)
        enough = len(answered.tokens) >= MIN_TOKENS
        return not (enough and answered.seconds[-1] > request.seconds_per_prompt)

    answer(prompt, request.new_tokens, on_token)
    return answered


def main(load: Callable[[Request], Answer], packages: tuple[str, ...]) -> None:
    """`python with_PEER.py REQUEST.json REPORT.json`; what fails ends in a traceback."""
    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    os.environ["OMP_NUM_THREADS"] = str(request.threads)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    start = time.perf_counter()
    answer = load(request)
    loaded = time.perf_counter() - start, read_bytes()
    answers = [ask(answer, request, prompt) for prompt in request.prompts]
    report = {
        "versions": {name: version(name) for name in packages},
        "load_seconds": loaded[0],
        "load_read_bytes": loaded[1],
        "peak_resident_bytes": peak_resident_bytes(),
        "answers": [asdict(one) for one in answers],
    }
    Path(sys.argv[2]).write_text(json.dumps(report))
