"""One answer's text and end, token by token."""

from runtime.generation.detokenizer import Detokenizer
from runtime.generation.sampling import SamplingParams
from runtime.serving.choice import (
    ChoiceEvent,
    ChoiceFinished,
    CompletionChoice,
    FinishReason,
    TokenDelta,
)
from tests.builders.tokenizers import byte_fallback_tokenizer


def test_stop_string__in_bytes_that_are_still_held_ends_the_answer_at_once() -> None:
    events: list[ChoiceEvent] = []
    sampling = SamplingParams(max_new_tokens=20, stop=("b€",))
    choice = CompletionChoice([1], sampling, deliver=events.extend)
    choice._detokenizer = Detokenizer(byte_fallback_tokenizer())
    tokens = "ab€".encode()
    assert [choice.on_token(token) for token in tokens] == [False] * 4 + [True]
    choice.complete()
    assert "".join(event.text for event in events if isinstance(event, TokenDelta)) == "a"
    assert events[-1] == ChoiceFinished(FinishReason.STOP)
