"""A server within the test's own process: its service can be looked into, its steps held up."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai

from runtime.config import BUILTIN_MODELS, ModelConfig
from runtime.serving.app import Settings, build_app, logged
from runtime.serving.choice import Choice
from runtime.serving.config import ServeConfig
from runtime.serving.observer import Observer
from runtime.serving.opening import open_served
from runtime.serving.orders import Limits
from runtime.serving.server import Ending, listen, serve, url_of
from runtime.serving.service import Served, Service, State
from tests.builders.models import tiny_qwen2_moe

WAIT_SECONDS = 60.0
CONFIGURED = {
    "config.json": {"max_position_embeddings": 2048, "eos_token_id": 0},
    "generation_config.json": {"eos_token_id": 0},
}
"""As the reference model is."""


def reference(**options: Any) -> Served:
    """The reference model in float32, half of its experts in memory."""
    return open_served(ServeConfig(model=ModelConfig(dtype="float32"), **options))


def speaking_model(folder: Path, **shape: Any) -> Path:
    """A tiny random model that speaks with the reference model's tokenizer and chat template, and
    is fifty times as quick as that."""
    tiny_qwen2_moe(folder, vocab_size=8192, **shape)
    for path in (BUILTIN_MODELS / "qwen2_moe_tiny").iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, folder)
    for name, more in CONFIGURED.items():
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return folder


def tiny(folder: Path, **options: Any) -> Served:
    """Such a model, half of its experts in memory."""
    return open_served(ServeConfig(model=ModelConfig(name="tiny", id=str(folder)), **options))


@dataclass
class Steps(Observer):
    """Lets the engine thread make so many steps as it is given, and keeps what it was told."""

    held: bool = False
    allowed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    told: list[tuple[str, Any]] = field(default_factory=list)
    num_steps: int = 0

    def refused(self, error: Exception) -> None:
        self.told.append(("refused", error))

    def queued(self, choice: Choice) -> None:
        self.told.append(("queued", choice))

    def started(self, choice: Choice) -> None:
        self.told.append(("started", choice))

    def ended(self, choice: Choice) -> None:
        self.told.append(("ended", choice))

    def stepped(self, seconds: float, choices: Sequence[Choice]) -> None:
        self.num_steps += 1
        if self.held:
            assert self.allowed.acquire(timeout=WAIT_SECONDS)

    def hold(self) -> None:
        """From now on each step waits, once it is made, for `release`."""
        self.held = True

    def release(self) -> None:
        """No step waits any more."""
        self.held = False
        self.allowed.release()


@dataclass
class Running:
    url: str
    service: Service
    steps: Steps
    end: Callable[[], None]
    """As a signal would; a second one hurries."""
    thread: threading.Thread

    def http(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=WAIT_SECONDS, **options)

    def openai(self, key: str = "any", **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, "timeout": WAIT_SECONDS, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)


@contextmanager
def running_server(
    open_model: Callable[[], Served] = reference,
    *,
    max_running: int = 8,
    max_waiting: int = 64,
    grace_seconds: float = 30.0,
    ready: bool = True,
    limits: Limits | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """Serves on a free port of the loopback until the end of the block."""
    steps = Steps()
    service = Service(
        open_model, max_running=max_running, max_waiting=max_waiting, observers=[steps]
    )
    limits = limits or Limits(max_together=max_running + max_waiting)
    app = logged(build_app(service, Settings(limits=limits, **settings)))
    ending = Ending()
    loops: list[asyncio.AbstractEventLoop] = []
    listening, loaded = threading.Event(), threading.Event()
    service.on_change(lambda state: loaded.set() if state is not State.LOADING else None)

    def told() -> None:
        loops.append(asyncio.get_running_loop())
        listening.set()

    with listen("127.0.0.1", 0) as listener:
        work = serve(
            app,
            service,
            listener,
            grace_seconds=grace_seconds,
            on_listening=told,
            handle_signals=False,
            ending=ending,
        )
        thread = threading.Thread(target=lambda: asyncio.run(work))
        thread.start()
        assert listening.wait(WAIT_SECONDS)

        def end() -> None:
            if not loops[0].is_closed():
                loops[0].call_soon_threadsafe(ending.ask, "the test ends it")

        try:
            if ready:
                assert loaded.wait(WAIT_SECONDS)
                assert service.state is State.READY, service.error
            yield Running(url_of(listener), service, steps, end, thread)
        finally:
            steps.release()
            end()
            end()
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()
