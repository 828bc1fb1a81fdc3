"""Configuration of `moecast serve` and `moecast monitor`."""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from predictors.config import SECRET, RunConfig, require_at_least
from predictors.errors import MoecastError, unknown
from runtime.config import AUTO, ServedConfig
from runtime.policy.budget import parse_size

MAX_PORT = 65535

LOCAL, RAY = "local", "ray"
ANY_NAME = "*"
"""In `served_name`: requests may name any model."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig(ServedConfig):
    launcher: str = LOCAL
    """local: serve in this process; ray: replicas behind Ray Serve (needs `moecast[ray]`)."""
    replicas: int = 1
    """With launcher=ray: number of servers, each with its own model and budget."""
    max_replicas: int | None = None
    """With launcher=ray: most replicas, which Ray Serve starts for more requests than max_running
    of each; none: always `replicas`."""
    scale_down_seconds: float = 600.0
    """With max_replicas: seconds after which superfluous replicas are stopped."""
    replica_cpus: int | None = None
    """With launcher=ray: cores that each replica requests; none: its share of this machine's."""
    replica_gpus: int | None = None
    """With launcher=ray: GPUs that each replica requests; none: one if Ray has any, unless
    device=cpu."""
    ray_address: str | None = None
    """With launcher=ray: address of a Ray cluster to join with a token; none: this machine only."""
    budget: str = AUTO
    """Memory for experts: auto (all, or what free memory allows), a size (4GiB), or a share of all
    experts (50% or 0.5)."""
    host: str = "127.0.0.1"
    """Address to listen on; one that other machines reach needs a key, or insecure=true."""
    port: int = 8000
    """Port to listen on; 0: a free port, which is printed."""
    api_key: str | None = field(default=None, metadata={SECRET: True})
    """API keys, separated by commas, or @FILE with one on each line; none: the variable
    MOECAST_API_KEY, which no list of processes shows."""
    insecure: bool = False
    """Listen beyond this machine without a key, and accept any Host header."""
    max_running: int = 8
    """Answers that are generated together; each has its own KV cache."""
    max_waiting: int = 64
    """Answers that may wait in the queue; further requests get 429."""
    served_name: str | None = None
    """Names of the model in requests, separated by commas, the first in answers; `*` accepts any
    name, for clients that cannot change theirs; none: the model's name."""
    kv_budget: str | None = None
    """Memory for the KV caches of running answers, such as 4GiB: a request waits until its prompt
    and max_tokens fit; max_tokens is lowered to what can ever fit, and a prompt that leaves no room
    gets 400. None: no limit but max_running."""
    prefix_cache: bool = True
    """Go on with an ended answer's KV cache where a prompt begins alike. Last bits may differ."""
    max_new_tokens: int = 4096
    """Most tokens of an answer: a larger max_tokens is lowered to it."""
    draft: str | None = None
    """Verify drafted tokens, several in a step, where that pays: prompt-lookup (what followed the
    same text before), or a small model with the same tokenizer (a folder, or ORG/NAME). Last bits
    may differ."""
    max_choices: int = 4
    """Largest n of a request: answers to one prompt."""
    max_body: str = "1MiB"
    """Largest size of a request's body."""
    grace: float = 30.0
    """Seconds that running requests get to finish after SIGTERM or Ctrl-C; 0: none."""
    log_prompts: bool = False
    """Write prompts and answers to the log too."""
    record: Path | None = None
    """File to which the prompts of a sample of the requests are appended as token ids, for `moecast
    collect data=jsonl`; none: nothing is recorded."""
    record_fraction: float = 0.1
    """Share of the answers whose prompts are recorded, drawn at random."""
    record_bytes: str = "64MiB"
    """Size of the file at which recording pauses."""
    chat_template: Path | None = None
    """File with a chat template (Jinja) that replaces the tokenizer's."""

    def __post_init__(self) -> None:
        minima = {"max_running": 1, "max_waiting": 0, "max_new_tokens": 1, "max_choices": 1}
        minima |= {"port": 0, "grace": 0, "replicas": 1}
        minima |= {"max_replicas": self.replicas, "replica_cpus": 1, "replica_gpus": 0}
        require_at_least(self, **minima, scale_down_seconds=0)
        self._check_recording()
        if parse_size(self.max_body, name="max_body") < 1:
            raise MoecastError(f"max_body={self.max_body}: must be at least 1 byte")
        if self.port > MAX_PORT:
            raise MoecastError(f"port={self.port}: must be at most {MAX_PORT}")
        if self.launcher not in (LOCAL, RAY):
            raise MoecastError(unknown("launcher", self.launcher, (LOCAL, RAY)))
        of_ray = {"replicas": 1, "max_replicas": None, "ray_address": None}
        of_ray |= {"replica_cpus": None, "replica_gpus": None}
        for name, default in of_ray.items():
            if self.launcher == LOCAL and getattr(self, name) != default:
                raise MoecastError(
                    f"{name}={getattr(self, name)}: launcher=local serves one replica in this "
                    "process; use launcher=ray"
                )
        if self.launcher == RAY and self.budget == AUTO:
            raise MoecastError(
                "budget=auto: with launcher=ray, replicas share a machine's memory; set the budget "
                "of each replica, such as budget=4GiB or budget=25%"
            )
        if self.launcher == RAY and self.port == 0:
            raise MoecastError("port=0: launcher=ray needs a port number")

    def _check_recording(self) -> None:
        if not 0 < self.record_fraction <= 1:
            raise MoecastError(
                f"record_fraction={self.record_fraction}: must be above 0 and at most 1"
            )
        if parse_size(self.record_bytes, name="record_bytes") < 1:
            raise MoecastError(f"record_bytes={self.record_bytes}: must be at least 1 byte")
        if self.record is not None and self.launcher == RAY:
            raise MoecastError(
                f"record={self.record}: launcher=ray records nothing; serve with launcher=local"
            )

    @property
    def accepted_names(self) -> list[str]:
        """The names in `served_name`, `ANY_NAME` among them."""
        names = [name.strip() for name in (self.served_name or "").split(",")]
        return [name for name in names if name]

    @property
    def served_names(self) -> list[str]:
        """The model's names in requests, the first in answers; `ANY_NAME` is none of them."""
        return [name for name in self.accepted_names if name != ANY_NAME] or [self.model.name]

    @property
    def max_accepted(self) -> int:
        """Most answers that run and wait."""
        return self.max_running + self.max_waiting

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.replicas

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the address."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own, without a name server."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class MonitorConfig(RunConfig):
    output: Path = Path("monitoring")
    """Folder for the files, which must not be there yet."""
