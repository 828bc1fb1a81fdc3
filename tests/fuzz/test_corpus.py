"""Every committed input, and mutations of them, end in an answer or in a documented error.

`MUTATIONS=20000 pytest tests/fuzz` tries that many of each target, for some minutes.
"""

import os
import random

import pytest

from tests.fuzz.mutation import mutate
from tests.fuzz.registry import TARGETS
from tests.fuzz.target import CORPUS

MUTATIONS = int(os.environ.get("MUTATIONS", "200"))


def test_corpus__has_a_folder_for_each_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_target__raises_documented_errors_only_within_its_bounds(name: str) -> None:
    target = TARGETS[name]
    corpus = target.corpus()
    assert corpus
    for data in corpus:
        target.check(data)
    rng = random.Random(name)
    for number in range(int(MUTATIONS * target.share)):
        data = mutate(rng.choice(corpus), rng, corpus)
        try:
            target.check(data)
        except Exception as error:
            raise AssertionError(f"{name}, mutation {number}: {data[:2000]!r}") from error
