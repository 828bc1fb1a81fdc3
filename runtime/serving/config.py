"""What `python -m runtime serve` can be told."""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from predictors.config import SECRET
from predictors.errors import MoecastError, unknown
from runtime.config import ServedConfig

LARGEST_PORT = 65535
LOCAL, RAY = "local", "ray"


@dataclass(kw_only=True)
class ServeConfig(ServedConfig):
    launcher: str = LOCAL
    """local: this process; ray: replicas behind Ray Serve (`pip install '.[ray]'`)."""
    replicas: int = 1
    """With launcher=ray: servers, each with a model and a budget of its own."""
    cluster: str | None = None
    """With launcher=ray: address of a Ray cluster to join, with its token; none: this machine."""
    budget: str = "50%"
    """Memory for experts: a size (4GiB, 512MiB) or a share of all experts' bytes (50%)."""
    host: str = "127.0.0.1"
    """Address to listen at; beyond this machine only with a key, or with insecure=true."""
    port: int = 8000
    """Port to listen at; 0: one that is free, which is then told."""
    key: str | None = field(default=None, metadata={SECRET: True})
    """What clients must show, several with commas between them, or @FILE with one a line; none:
    MOECAST_API_KEY, which other users of the machine do not see in its list of processes."""
    insecure: bool = False
    """Listen beyond this machine without a key, and answer whatever host name is asked for."""
    served_name: str | None = None
    """What clients call the model; none: its short name. Its id is always understood too."""
    max_running: int = 8
    """Answers that are generated together; each keeps a key-value cache of its own."""
    max_waiting: int = 64
    """Answers that wait for their turn; who comes then is told 429."""
    kv_budget: str | None = None
    """Memory for the caches of keys and values of answers that are generated together, such as
    4GiB; what has no room for its longest answer waits. None: max_running of any length."""
    max_new_tokens: int = 4096
    """The most tokens that one answer may ask for."""
    max_choices: int = 4
    """The most answers to one prompt (n)."""
    max_stop: int = 4
    """The most stop strings."""
    max_body: str = "1MiB"
    """The largest request."""
    grace: float = 30.0
    """Seconds that accepted requests are given to end after SIGTERM or Ctrl-C; 0: none."""
    log_prompts: bool = False
    """Also write prompts and answers to the log."""
    chat_template: Path | None = None
    """File with a chat template (Jinja) in place of the tokenizer's; without either, turns are
    written as plain text."""

    def __post_init__(self) -> None:
        least = {"max_running": 1, "max_waiting": 0, "max_new_tokens": 1, "max_choices": 1}
        for name, number in {**least, "max_stop": 0, "port": 0, "grace": 0}.items():
            if getattr(self, name) < number:
                raise MoecastError(f"{name}={getattr(self, name)}: must be at least {number}")
        if self.replicas < 1:
            raise MoecastError(f"replicas={self.replicas}: must be at least 1")
        if self.launcher == LOCAL and (self.replicas > 1 or self.cluster):
            raise MoecastError(
                f"replicas={self.replicas}, cluster={self.cluster}: one process serves one "
                "replica; several are served with launcher=ray"
            )
        if self.launcher not in (LOCAL, RAY):
            raise MoecastError(unknown("launcher", self.launcher, (LOCAL, RAY)))
        if self.launcher == RAY and self.port == 0:
            raise MoecastError("port=0: with launcher=ray name the port to listen at")
        if self.port > LARGEST_PORT:
            raise MoecastError(f"port={self.port}: must be at most {LARGEST_PORT}")

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the address."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own, asking no name server."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


SCHEMAS: dict[str, type] = {"serve": ServeConfig}
