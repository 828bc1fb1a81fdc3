"""Responses whose answer is a list of items, in the order in which the model wrote them."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from runtime.generation.answer import FinishReason, TokenDelta
from runtime.serving.answers.answer_parser import OutputDelta, ToolCall
from runtime.serving.api.responses import ResponseBuilder
from runtime.serving.choice import ChoiceEvent

ItemKind = Literal["reasoning", "text", "call"]


class ItemizedResponse(ResponseBuilder):
    """One answer as items: reasoning, text and tool calls.

    A whole response is made by the events too, which are not sent.
    """

    last_line = ""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.items: list[dict[str, Any]] = []
        self.kind: ItemKind | None = None
        """Of the last item, until it ends."""
        self.num_reasoning = 0
        """Tokens up to the end of the reasoning."""
        self._num_tokens = 0

    async def whole(self) -> dict[str, Any]:
        async for item in self.stream.events():
            assert item is not None
            for _ in self.events(item[0], self.read(*item)):
                pass
        return self.response()

    def read(self, index: int, events: Sequence[ChoiceEvent]) -> OutputDelta:
        tokens = [event.token for event in events if isinstance(event, TokenDelta)]
        self._num_tokens += len(tokens) - tokens.count(None)
        return super().read(index, events)

    def events(self, index: int, output: OutputDelta) -> Iterable[dict[str, Any]]:  # noqa: ARG002
        pieces: list[tuple[ItemKind, str, ToolCall | None]] = [
            ("reasoning", output.reasoning, None),
            ("text", output.text, None),
            *(("call", call.arguments, call) for call in output.calls),
        ]
        for kind, text, call in pieces:
            if not text:
                continue
            if call is not None or kind != self.kind:
                if self.items and call is None:
                    # Not needed between items.
                    text = text.removeprefix("\n")
                yield from self._end_last(FinishReason.STOP)
                self.kind = kind
                yield from self.begin_item(kind, call)
            yield from self.add_text(kind, text)
        if output.finish_reason is not None:
            yield from self._end_last(output.finish_reason)
            yield from self.finish(output.finish_reason)

    def _end_last(self, reason: FinishReason) -> Iterable[dict[str, Any]]:
        if self.kind == "reasoning":
            self.num_reasoning = self._num_tokens
        if self.kind is not None:
            yield from self.end_item(self.kind, reason)
        self.kind = None

    @abstractmethod
    def response(self) -> dict[str, Any]:
        """The response as it is now."""

    @abstractmethod
    def begin_item(self, kind: ItemKind, call: ToolCall | None) -> Iterable[dict[str, Any]]:
        """Begin an item, a call without its arguments."""

    @abstractmethod
    def add_text(self, kind: ItemKind, text: str) -> Iterable[dict[str, Any]]:
        """Add to the last item; the text of a call is its arguments."""

    @abstractmethod
    def end_item(self, kind: ItemKind, reason: FinishReason) -> Iterable[dict[str, Any]]:
        """End the last item; `reason` is that of the answer's end if it ends with it."""

    @abstractmethod
    def finish(self, reason: FinishReason) -> Iterable[dict[str, Any]]:
        """End the answer."""
