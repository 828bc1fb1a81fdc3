"""`moecast chat`: chat with a model in the terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console

from runtime.commands.generate import make_stats_table
from runtime.commands.progress import print_auto_budget, strip_control_characters
from runtime.engine.loading import ModelHandle, load_served
from runtime.engine.memory import freeze_objects
from runtime.errors import ChatError, StepMemoryError, TransferError
from runtime.generation.answer import Answer, TokenDelta
from runtime.generation.chat_template import Conversation, end_of_turn, load_chat_tokenizer
from runtime.generation.config import ChatConfig
from runtime.generation.drafting import drafting_options, load_draft_model
from runtime.generation.prefix_cache import PrefixCache, RunningText, find_prefix_obstacle
from runtime.generation.sampling import drawing_options
from runtime.hf.model_faults import check_tokens
from runtime.hf.tokens import context_length, eos_token_ids
from runtime.store.model_source import resolve

HELP = """/reset   forget the conversation (the system prompt stays)
/stats   hits, bytes, times and memory since the start
/quit    end (so does Ctrl-D); Ctrl-C stops an answer
A line that ends with \\ continues in the next one; // begins a message that begins with /."""
MORE = "\\"


def run(config: ChatConfig) -> dict[str, Any]:
    """Chat until the user quits; returns counts and statistics, but no text."""
    torch.manual_seed(config.seed)
    tokenizer = load_chat_tokenizer(resolve(config.model), config.chat_template)
    draft_model = load_draft_model(config.draft, config.model)
    model = load_served(config, budget=config.budget, draft_model=draft_model)
    with model.moecast as handle:
        freeze_objects()
        print_auto_budget(handle)
        ending = end_of_turn(tokenizer)
        end_ids = sorted({*eos_token_ids(model), *ending.token_ids})
        # The default would be 50 for models whose generation config names none.
        top_k = model.generation_config.top_k or 0
        options = {
            "eos_token_id": end_ids or None,
            "pad_token_id": end_ids[0] if end_ids else 0,
            **drawing_options(config.temperature, top_p=config.top_p, top_k=top_k),
            **drafting_options(model, config.draft, draft_model=draft_model),
        }

        kept = None
        if config.prefix_cache and find_prefix_obstacle(model) is None:
            kept = PrefixCache(model, max_texts=1)

        def generate(answer: Answer, prompt: list[int], max_new_tokens: int) -> None:
            check_tokens(prompt, model.config)
            with continue_text(kept, prompt) as text:
                answer.generate(
                    model, tokenizer, prompt, cached=text, max_new_tokens=max_new_tokens, **options
                )

        chat = ChatTerminal(
            Console(highlight=False),
            handle,
            config,
            Conversation(
                tokenizer,
                context=context_length(model.config),
                max_new_tokens=config.max_new_tokens,
                system_prompt=config.system_prompt,
            ),
            partial(Answer, stop=ending.strings, end_ids=end_ids),
            generate,
        )
        chat.talk()
        return {"model": handle.spec.as_dict(), **chat.counts, "stats": handle.stats()}


@contextlib.contextmanager
def continue_text(kept: PrefixCache | None, prompt: list[int]) -> Iterator[RunningText | None]:
    """Go on with the text of the turn before, whose memory the answer takes over."""
    text = None if kept is None else kept.begin(prompt)
    if kept is None or text is None:
        yield None
        return
    kept.forget()
    is_intact = False
    try:
        yield text
        is_intact = True
    finally:
        kept.end(text, is_intact=is_intact)


@dataclass
class ChatTerminal:
    """The chat's input and output; without a terminal, only answers are printed."""

    console: Console
    handle: ModelHandle
    config: ChatConfig
    conversation: Conversation
    make_answer: Callable[[Callable[[TokenDelta], None]], Answer]
    generate: Callable[[Answer, list[int], int], None]
    """Generates an answer to a prompt, with a number of tokens at most."""

    def __post_init__(self) -> None:
        self._is_terminal = self.console.is_terminal and sys.stdin.isatty()
        self.counts = {"num_answers": 0, "num_tokens": 0, "num_interrupted": 0}

    def talk(self) -> None:
        """Chat until /quit or the end of the input."""
        if self._is_terminal:
            # Line editing and the history of this conversation; not everywhere there.
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401
            self._note("/help lists the commands; /quit ends")
        interrupted = False
        while True:
            try:
                if interrupted:
                    interrupted = False
                    self._note("\n/quit or Ctrl-D ends")
                if not self._take_turn():
                    return
            except KeyboardInterrupt:
                # Only this here: a second Ctrl-C while the hint is printed must not end the chat.
                interrupted = True
                if not self._is_terminal:
                    raise

    def _take_turn(self) -> bool:
        """Read a message and answer it; False ends the conversation."""
        message = self._read()
        if message is None:
            return False
        if message.startswith("/") and not message.startswith("//"):
            return self._obey(message)
        if message.strip():
            self._answer(message.removeprefix("/"))
        return True

    def _read(self) -> str | None:
        """Read the next message; None at the end of the input."""
        lines: list[str] = []
        while True:
            line = self._line("... " if lines else "> ")
            if line is None:
                return "\n".join(lines) if lines else None
            if not line.endswith(MORE):
                return "\n".join([*lines, line])
            lines.append(line.removesuffix(MORE))

    def _line(self, prompt: str) -> str | None:
        try:
            line = input(prompt) if self._is_terminal else sys.stdin.readline()
            # In the C locale, bytes that are no text are let through.
            line.encode()
        except EOFError:
            self.console.print()
            return None
        except UnicodeError as error:
            raise ChatError(f"the input is not text in UTF-8 ({error})") from error
        if self._is_terminal:
            return line
        return line.rstrip("\n") if line else None

    def _obey(self, command: str) -> bool:
        """Execute a command; returns False to end the chat."""
        match command.strip():
            case "/quit" | "/exit":
                return False
            case "/reset":
                self.conversation.reset()
                self._note("conversation reset")
            case "/stats":
                make_stats_table(self.handle.stats(), self.config).print(self.console)
            case "/help":
                self.console.print(HELP, markup=False)
            case other:
                self._note(f"{other} is not a command; /help lists them")
        return True

    def _answer(self, message: str) -> None:
        conversation = self.conversation
        conversation.append("user", message)
        pieces: list[str] = []

        def show(delta: TokenDelta) -> None:
            pieces.append(delta.text)
            self.console.out(strip_control_characters(delta.text), end="", highlight=False)

        answer, is_interrupted = self.make_answer(show), False
        try:
            prompt = conversation.prompt()
            if prompt.num_dropped:
                self._note(
                    f"the oldest {prompt.num_dropped} messages exceed the model's context of "
                    f"{conversation.context} tokens and were dropped"
                )
            room = prompt.room or self.config.max_new_tokens
            before = self.handle.stats()
            try:
                self.generate(answer, prompt.tokens, min(room, self.config.max_new_tokens))
            except KeyboardInterrupt:
                is_interrupted = True
            answer.end()
        except (ChatError, StepMemoryError, TransferError) as error:
            conversation.remove_last()
            self.console.print()
            self._note(f"error: {error}")
            return
        except KeyboardInterrupt:
            conversation.remove_last()
            raise
        self.console.print()
        conversation.append("assistant", "".join(pieces))
        self.counts["num_answers"] += 1
        self.counts["num_tokens"] += answer.num_tokens
        self.counts["num_interrupted"] += is_interrupted
        if is_interrupted:
            self._note("stopped")
        if self._is_terminal:
            self._note(summarize_answer(answer, before, self.handle.stats()))

    def _note(self, text: str) -> None:
        """Print a note, dim on a terminal, else to stderr."""
        if self._is_terminal:
            self.console.print(text, style="dim", markup=False)
        else:
            sys.stderr.write(f"{text}\n")


def summarize_answer(answer: Answer, before: dict[str, Any], after: dict[str, Any]) -> str:
    """Summarise an answer's cost in a line."""
    parts = [f"{answer.num_tokens} tokens"]
    if answer.first_token_seconds is not None:
        parts.append(f"first after {answer.first_token_seconds:.2f} s")
    if answer.tpot_seconds is not None:
        parts.append(f"{1 / answer.tpot_seconds:.1f} tokens/s")
    requests = after["requests"] - before["requests"]
    if requests:
        parts.append(f"hits {100 * (after['hits'] - before['hits']) / requests:.0f} %")
    return ", ".join(parts)
