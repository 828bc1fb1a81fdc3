"""A server in the test's own process, whose service can be inspected and its steps held."""

import asyncio
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2
import openai

from runtime.config import BUILTIN_MODELS, ModelConfig
from runtime.serving import service as services
from runtime.serving.app import create_app
from runtime.serving.choice import CompletionChoice
from runtime.serving.config import ServeConfig
from runtime.serving.served_model import LoadedModel, load_model
from runtime.serving.server import ShutdownRequest, listen, serve, server_url
from runtime.serving.service import GenerationService, ServiceObserver, ServiceState
from tests.builders.models import set_fields, tiny_qwen2_moe

WAIT_SECONDS = 240.0
CONFIGURED = {
    "config.json": {"max_position_embeddings": 2048, "eos_token_id": 0},
    "generation_config.json": {"eos_token_id": 0},
}
"""Settings of the reference model."""
HALF = {"budget": "50%"}
PROMPTS = [
    "The heart pumps blood", "def", "It was late in the evening when the old man came to the door",
    "Return a new list", "A", "She opened the letter, read it twice, and said nothing",
    "The river runs through the valley and into the sea", "0 1 2",
]  # fmt: skip


def reference(**options: Any) -> LoadedModel:
    """The reference model in float32, half of its experts in memory."""
    return load_model(ServeConfig(model=ModelConfig(dtype="float32"), **HALF | options))


def speaking_model(folder: Path, **shape: Any) -> Path:
    """A tiny random model with the reference model's tokenizer and template, 50 times faster."""
    tiny_qwen2_moe(folder, vocab_size=8192, **shape)
    for path in (BUILTIN_MODELS / "qwen2_moe_tiny").iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, folder)
    for name, more in CONFIGURED.items():
        set_fields(folder, name, **more)
    return folder


def tiny(folder: Path, **options: Any) -> LoadedModel:
    """A model of `speaking_model`, half of its experts in memory."""
    model = ModelConfig(name="tiny", id=str(folder))
    return load_model(ServeConfig(**{"model": model, **HALF, **options}))


@dataclass
class StepGate(ServiceObserver):
    """Holds the engine thread after a step when asked to, and records the service's events."""

    held: bool = False
    allowed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    events: list[tuple[str, Any]] = field(default_factory=list)
    num_steps: int = 0
    after_step: Callable[[Sequence[CompletionChoice]], object] = lambda _: None
    """Called in the engine thread, before other observers."""

    def _note(self, event: str, subject: Any) -> None:
        self.events.append((event, subject))

    def of(self, event: str) -> list[Any]:
        """The subjects of an event, in order."""
        return [subject for name, subject in self.events if name == event]

    on_rejected = partialmethod(_note, "rejected")
    on_queued = partialmethod(_note, "queued")
    on_started = partialmethod(_note, "started")
    on_ended = partialmethod(_note, "ended")

    def on_step(self, seconds: float, choices: Sequence[CompletionChoice]) -> None:
        self.num_steps += 1
        self.after_step(choices)
        if self.held:
            assert self.allowed.acquire(timeout=WAIT_SECONDS)

    def hold(self) -> None:
        """Make each step wait, once it is done, for `release`."""
        self.held = True

    def release(self) -> None:
        """Let all steps continue."""
        self.held = False
        self.allowed.release()


@dataclass
class RunningServer:
    url: str
    service: GenerationService
    steps: StepGate
    end: Callable[[], None]
    """Acts as SIGTERM; a second call skips the grace period."""
    thread: threading.Thread

    def http(self, **options: Any) -> httpx2.Client:
        # Without certificates, which take a tenth of a second to load and which nothing here needs.
        options.setdefault("verify", False)
        return httpx2.Client(base_url=self.url, timeout=WAIT_SECONDS, **options)

    def ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """The answer to a client of its own."""
        with self.http() as client:
            return client.request(method, path, **options)

    get, post = partialmethod(ask, "GET"), partialmethod(ask, "POST")

    def connect(self, content: bytes = b"") -> socket.socket:
        """A connection of bytes as they are, which the caller closes; the content has been sent."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)
        connection.sendall(content)
        return connection

    def wait_end(self) -> None:
        """Waits until the server has ended."""
        self.thread.join(WAIT_SECONDS)
        assert not self.thread.is_alive()

    def openai(self, key: str = "any", **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, "timeout": WAIT_SECONDS, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)


@contextmanager
def running_server(
    open_model: Callable[[], LoadedModel] = reference,
    *,
    max_running: int = 8,
    max_waiting: int = 64,
    grace_seconds: float = 30.0,
    ready: bool = True,
    idle_after_seconds: float = services.IDLE_AFTER_SECONDS,
    install: Callable[[GenerationService], None] = lambda _: None,
    options: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Iterator[RunningServer]:
    """Serve on a free port of the loopback until the end of the block.

    Args:
        install: may add to the service.
        options: of `moecast serve`.
        settings: of `create_app`.
    """
    steps = StepGate()
    limits = {"max_running": max_running, "max_waiting": max_waiting}
    idle = {"idle_after_seconds": idle_after_seconds}
    service = GenerationService(open_model, **limits, **idle, observers=[steps])
    install(service)
    options = {"insecure": True, **limits, **options}
    app = create_app(service, ServeConfig(model=ModelConfig(name="tiny"), **options), **settings)
    shutdown = ShutdownRequest()
    listening: Future[asyncio.AbstractEventLoop] = Future()
    loaded = threading.Event()
    service.on_state_change(lambda now: loaded.set() if now is not ServiceState.LOADING else None)

    with listen("127.0.0.1", 0) as listener:
        work = serve(
            app, service, listener, grace_seconds=grace_seconds, shutdown=shutdown,
            on_listening=lambda: listening.set_result(asyncio.get_running_loop()),
        )  # fmt: skip
        thread = threading.Thread(target=lambda: asyncio.run(work))
        thread.start()
        loop = listening.result(WAIT_SECONDS)

        def end() -> None:
            with suppress(RuntimeError):  # the server has ended, and closed its loop
                loop.call_soon_threadsafe(shutdown.request, "the test ends it")

        try:
            if ready:
                assert loaded.wait(WAIT_SECONDS)
                assert service.state is ServiceState.READY, service.error
            yield RunningServer(server_url(listener), service, steps, end, thread)
        finally:
            steps.release()
            end()
            end()
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()
