"""Prompts: texts from a source, chosen and cut in a way that repeats."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from collect.config import DataConfig, SourceKind
from collect.errors import PromptError
from collect.sources import hub_texts, jsonl_texts, pydoc_texts, source_texts, text_file
from collect.traces.split import prompt_digest

CHARS_PER_TOKEN = 4
"""About, for English in common vocabularies: how long a text a prompt of so many tokens needs."""

MIN_PIECE_CHARS = 200
"""Shorter pieces of a long text are hardly prompts, however many are asked for."""


@dataclass(frozen=True)
class Prompt:
    """One text to run through the model."""

    text: str
    dataset: str

    @cached_property
    def digest(self) -> str:
        return prompt_digest(self.text)


SOURCES: Mapping[SourceKind, Callable[[DataConfig], Iterable[str]]] = {
    SourceKind.PYDOCS: pydoc_texts,
    SourceKind.PYSOURCE: source_texts,
    SourceKind.JSONL: jsonl_texts,
    SourceKind.TEXT: text_file,
    SourceKind.HUB: hub_texts,
}

LONG_TEXTS = (SourceKind.PYDOCS, SourceKind.PYSOURCE, SourceKind.TEXT)
"""Sources of documents, to be cut; the others hold one prompt a record."""


def load_prompts(data: DataConfig, *, seed: int = 0) -> list[Prompt]:
    """At most `data.num_prompts` different prompts; the same ones for the same source and seed.

    Raises:
        PromptError: no such file or data set, or nothing in it that can be used.
    """
    texts: Iterable[str] = SOURCES[data.kind](data)
    if data.kind in LONG_TEXTS:
        longest = data.max_prompt_tokens * CHARS_PER_TOKEN
        texts = cut(list(texts), num_pieces=data.num_prompts, longest=longest)
    # A dictionary: the first of each text, in order.
    kept = list(dict.fromkeys(text for text in texts if len(text.strip()) >= data.min_chars))
    if not kept:
        raise PromptError(
            f"data={data.name} holds no text of at least {data.min_chars} characters: "
            "name the keys with data.fields=[KEY], or lower data.min_chars"
        )
    if len(kept) > data.num_prompts:
        chosen = sorted(random.Random(seed).sample(range(len(kept)), data.num_prompts))
        kept = [kept[i] for i in chosen]
    return [Prompt(text, data.name) for text in kept]


def cut(texts: list[str], *, num_pieces: int, longest: int) -> Iterator[str]:
    """About `num_pieces` pieces of equal length that do not overlap.

    More where the texts are so long that pieces of `longest` characters do not use them up.
    """
    total = sum(map(len, texts))
    piece = max(MIN_PIECE_CHARS, min(longest, total // num_pieces))
    for text in texts:
        start = 0
        while start < len(text):
            end = start + piece
            if end < len(text):
                # Between two words; a text without spaces is cut where it comes.
                space = max(text.rfind(" ", start, end), text.rfind("\n", start, end))
                end = space if space > start else end
            yield text[start:end].strip()
            start = end
