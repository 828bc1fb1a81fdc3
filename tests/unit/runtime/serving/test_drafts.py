"""A server with `draft=` answers as one without."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime.config import PROMPT_LOOKUP
from runtime.generation import drafting
from tests.builders.serving import RunningServer, running_server, tiny
from tests.unit.runtime.generation.test_drafting import EagerPace
from tests.unit.runtime.serving.test_completions import raw

PROMPTS = ["the heart pumps blood, the heart pumps", "zero"]
GRAMMAR = "abab, 7 "
"""What is drafted from its repetitions, and refused where another number comes first."""
CONSTRAINED = {"prompt": GRAMMAR * 2, "structured_outputs": {"regex": f"({GRAMMAR}7 ){{4}}"}}
OPTIONS = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}


def answers(server: RunningServer, *, num_together: int) -> list[object]:
    """Answers to each prompt, with log-probabilities, to a grammar, and one that repeats itself."""
    bodies = [*({"prompt": prompt} for prompt in PROMPTS), {"prompt": PROMPTS[0], "logprobs": 2}]
    bodies += [CONSTRAINED, {"prompt": "a", "logit_bias": {"9": 100}}]

    def ask(body: dict[str, object]) -> object:
        answer = raw(server, "/v1/completions", **OPTIONS, **body)
        return answer["choices"], answer["usage"]

    with ThreadPoolExecutor(num_together) as pool:
        return list(pool.map(ask, bodies))


@pytest.mark.parametrize("source", [PROMPT_LOOKUP, "model"])
def test_drafts__answers_are_those_without(folder, server, source, monkeypatch):
    draft, pace = str(folder) if source == "model" else source, EagerPace()
    monkeypatch.setattr(drafting, "DraftPace", lambda: pace)
    expected = answers(server, num_together=4)
    loaded = tiny(folder, draft=draft, budget="auto")
    assert (loaded.model.moecast.auto_budget.free.draft > 0) == (source == "model")
    loaded.model.close()
    with running_server(lambda: tiny(folder, draft=draft)) as drafting_server:
        for num_together in (4, 1):
            assert answers(drafting_server, num_together=num_together) == expected
        refused = pace.num_drafted - pace.num_accepted
        raw(drafting_server, "/v1/completions", **OPTIONS, **CONSTRAINED)
        assert pace.num_drafted - pace.num_accepted > refused
    assert pace.num_accepted > 0
