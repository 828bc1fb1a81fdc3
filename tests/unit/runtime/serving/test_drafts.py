"""A server with `draft=` answers as one without."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.config import PROMPT_LOOKUP
from tests.builders.serving import RunningServer, running_server, tiny

PROMPTS = [
    "one two three four one two three four one two",
    "the heart pumps blood, the heart pumps",
    "zero",
]


def answers(server: RunningServer) -> list[object]:
    """Answers to each prompt, and one with log-probabilities; all are made at the same time."""
    client = server.openai()

    def ask(prompt: str, logprobs: int | None) -> object:
        answer = client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=24,
            temperature=0,
            logprobs=logprobs,
            extra_body={"ignore_eos": True},
        )
        return answer.choices, answer.usage

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, [*PROMPTS, PROMPTS[0]], [None, None, None, 2]))


@pytest.mark.parametrize("source", [PROMPT_LOOKUP, "model"])
def test_drafts__answers_are_those_without(folder: Path, source: str) -> None:
    draft = str(folder) if source == "model" else source
    with running_server(lambda: tiny(folder)) as server:
        expected = answers(server)
    with running_server(lambda: tiny(folder, draft=draft)) as server:
        assert answers(server) == expected
        # What the first answers have shown lets later ones draft.
        assert answers(server) == expected
