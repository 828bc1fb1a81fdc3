"""A server with `draft=` answers as one without."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.config import PROMPT_LOOKUP
from tests.builders.serving import RunningServer, running_server, speaking_model, tiny

PROMPTS = [
    "one two three four one two three four one two",
    "the heart pumps blood, the heart pumps",
    "zero",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("drafts") / "tiny")


def answers(server: RunningServer) -> list[tuple[str, int]]:
    """Text and number of tokens of each prompt's answer; all are generated at the same time."""

    def ask(prompt: str) -> tuple[str, int]:
        client = server.openai()
        answer = client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=24,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        return answer.choices[0].text, answer.usage.completion_tokens

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


@pytest.mark.parametrize("source", [PROMPT_LOOKUP, "model"])
def test_drafts__answers_are_those_without(folder: Path, source: str) -> None:
    draft = str(folder) if source == "model" else source
    with running_server(lambda: tiny(folder)) as server:
        expected = answers(server)
    with running_server(lambda: tiny(folder, draft=draft)) as server:
        assert answers(server) == expected
        # What the first answers have shown lets later ones draft.
        assert answers(server) == expected


def test_drafts__log_probabilities_are_those_of_single_tokens(folder: Path) -> None:
    def ask(server: RunningServer) -> object:
        answer = server.openai().completions.create(
            model="tiny", prompt=PROMPTS[0], max_tokens=12, temperature=0, logprobs=2
        )
        return answer.choices[0].logprobs

    with running_server(lambda: tiny(folder)) as server:
        expected = ask(server)
    with running_server(lambda: tiny(folder, draft=PROMPT_LOOKUP)) as server:
        assert ask(server) == expected
