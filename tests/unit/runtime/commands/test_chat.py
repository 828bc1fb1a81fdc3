"""What the terminal shows of an answer."""

from runtime.chat.answering import Answer
from runtime.commands.chat import printable, summary


def test_printable__lets_no_escape_sequence_through() -> None:
    assert printable("a\x1b[2Jb\tc\nd\x9bm\r\x07é") == "a[2Jb\tc\ndmé"


def test_summary__counts_this_answers_requests_only() -> None:
    said = Answer(text="x", num_tokens=5, seconds=3.0, first_token_seconds=1.0)
    line = summary(said, {"requests": 100, "hits": 10}, {"requests": 140, "hits": 40})
    assert line == "5 tokens, first after 1.00 s, 2.0 tokens/s, hits 75 %"


def test_summary__of_no_token_says_so() -> None:
    assert summary(Answer(), {"requests": 1, "hits": 1}, {"requests": 1, "hits": 1}) == "0 tokens"
