"""Prompts: texts of Python's documentation, of local files or of the Hub, chosen and cut.

A prompt that a server has recorded (`moecast serve record=FILE`) is a tuple of token ids.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from collect.config import DataConfig, SourceKind
from collect.errors import PromptError
from collect.traces.layout import Split, choose_split, prompt_digest
from predictors.files import (
    expand_home,
    explain_no_home,
    read_text_file,
    require_plain_file,
)

CHARS_PER_TOKEN = 4
"""Approximate, for English and common vocabularies."""

FEWEST_TO_TRAIN = 3
"""Prompts: one to train on, one for validation, one held out."""

MIN_PIECE_CHARS = 200
"""Shortest piece of a long text, however many prompts are requested."""


TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class PromptText:
    """A text, or its token ids, to run through the model, and its source."""

    text: str | TokenIds
    dataset: str

    @cached_property
    def digest(self) -> str:
        return digest_of(self.text)


def digest_of(text: str | TokenIds) -> str:
    return prompt_digest(text if isinstance(text, str) else json.dumps(text))


USUAL_FIELDS = ("prompt", "text", "question", "instruction", "content")
TOKENS = "tokens"
"""Key of the token ids in a line that a server has recorded."""
USER_ROLES = ("user", "human")
OFFLINE = (
    "Offline: data=pydocs and data=pysource need neither file nor network; data=jsonl "
    "data.path=FILE and data=text data.path=FILE-OR-FOLDER read local files"
)


def read_pydocs(_data: DataConfig) -> Iterator[str]:
    """Yields Python's language reference by topic (about 0.46 M characters)."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


SOURCE_MODULES = (
    "argparse", "ast", "asyncio", "bdb", "calendar", "cmd", "code", "collections", "configparser",
    "csv", "ctypes", "dataclasses", "datetime", "decimal", "difflib", "dis", "doctest", "email",
    "enum", "fractions", "ftplib", "functools", "gettext", "heapq", "html", "http", "inspect",
    "ipaddress", "json", "locale", "logging", "mailbox", "mimetypes", "numbers", "optparse", "os",
    "pathlib", "pdb", "pickle", "platform", "plistlib", "pprint", "random", "re", "sched", "shelve",
    "shlex", "shutil", "smtplib", "socket", "sqlite3", "statistics", "string", "subprocess",
    "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "trace", "typing",
    "unittest", "urllib", "uuid", "wave", "weakref", "xml", "zipfile",
)  # fmt: skip
"""Modules written in Python that every Python 3 has."""


def read_source_code(_data: DataConfig) -> Iterator[str]:
    """Yields the standard library's source code, module by module."""
    for name in SOURCE_MODULES:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            yield Path(spec.origin).read_text(encoding="utf-8", errors="replace")


def read_text_files(data: DataConfig) -> Iterator[str]:
    """Yields a file as one text, or each `*.txt` of a folder in the order of names."""
    folder = expand_home(data.path or "")
    if data.path is None or not folder.is_dir():
        yield read_text_file(_local(data))
        return
    files = sorted(folder.rglob("*.txt"))
    if not files:
        raise PromptError(f"data.path={data.path}: the folder contains no *.txt")
    for path in files:
        yield read_text_file(path)


def read_jsonl(data: DataConfig) -> Iterator[str | TokenIds]:
    """Yields the text of each line, or the token ids of its key `tokens`."""
    path = _local(data)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise PromptError(
                    f"{where} is not JSON ({error.msg}); use data=text for plain text"
                ) from None
            except (ValueError, RecursionError) as error:
                # Bytes that are not UTF-8, a number of thousands of digits, or lists within lists.
                raise PromptError(f"{where} cannot be read as JSON: {error}") from None
            if isinstance(row, str):
                yield row
            elif isinstance(row, Mapping) and TOKENS in row and not data.fields:
                yield extract_tokens(row[TOKENS], where=where)
            else:
                yield extract_text(row, data.fields, where=where)


def extract_tokens(given: Any, *, where: str) -> TokenIds:
    is_list = isinstance(given, list) and given
    if not is_list or not all(type(token) is int and token >= 0 for token in given):
        raise PromptError(f"{where}: tokens must be a list of token ids, such as [12, 7]")
    return tuple(given)


def _local(data: DataConfig) -> Path:
    if data.path is None:
        raise PromptError(f"data={data.name} needs a file: data.path=FILE")
    path = require_plain_file(expand_home(data.path), PromptError)
    if not path.is_file():
        raise PromptError(f"data.path={data.path}: no such file. {OFFLINE}")
    return path


def read_hub(data: DataConfig) -> Iterator[str]:
    """Yields the text of each row of a Hub data set, which is cached.

    Raises:
        PromptError: not on the Hub, or the Hub is out of reach.
    """
    if data.path is None:
        raise PromptError(f"data={data.name} needs a data set: data.path=OWNER/NAME")
    import datasets

    if str(datasets.config.HF_DATASETS_CACHE).startswith("~"):
        raise PromptError(explain_no_home("HF_HOME"))
    from huggingface_hub.errors import HfHubHTTPError

    try:
        rows = datasets.load_dataset(
            data.path, data.subset, split=data.split, data_files=data.files, revision=data.revision
        )
    except (OSError, HfHubHTTPError, ValueError) as error:
        # Transport errors and unknown names are OSError; ValueError lists the subsets.
        cause = str(error).split("\n")[0]
        raise PromptError(
            f"data={data.name}: {data.path!r} cannot be read from the Hub "
            f"({type(error).__name__}: {cause}). {OFFLINE}"
        ) from error
    for number, row in enumerate(rows):
        yield extract_text(row, data.fields, where=f"{data.path}, row {number}")


def extract_text(row: Any, fields: Sequence[str], *, where: str) -> str:
    """Returns the prompt in a record; raises PromptError with its keys if none fits."""
    if not isinstance(row, Mapping):
        raise PromptError(f"{where}: expected a record with keys, got {type(row).__name__}")
    chosen = list(fields) or [key for key in USUAL_FIELDS if key in row][:1]
    if not chosen or any(key not in row for key in chosen):
        problem = f"has no {', '.join(key for key in chosen if key not in row)}" if chosen else ""
        raise PromptError(
            f"{where} {problem or 'has none of the usual keys'}; it has "
            f"{', '.join(map(str, row))}. Choose with data.fields=[KEY]"
        )
    return "\n\n".join(filter(None, (_plain(row[key], where=where) for key in chosen)))


def _plain(value: Any, *, where: str) -> str:
    """Returns a text itself, a conversation's first user turn, or the first text of a list."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, Sequence) and value:
        turns = [turn for turn in value if isinstance(turn, Mapping)]
        if not turns:
            return _plain(value[0], where=where)
        for turn in turns:
            if turn.get("role", turn.get("from")) in USER_ROLES:
                return str(turn.get("content", turn.get("value", "")))
        return ""
    if isinstance(value, Sequence):
        return ""
    raise PromptError(f"{where}: expected a text or a conversation, got {type(value).__name__}")


SOURCES: Mapping[SourceKind, Callable[[DataConfig], Iterable[str | TokenIds]]] = {
    SourceKind.PYDOCS: read_pydocs,
    SourceKind.PYSOURCE: read_source_code,
    SourceKind.JSONL: read_jsonl,
    SourceKind.TEXT: read_text_files,
    SourceKind.HUB: read_hub,
}

LONG_TEXTS = (SourceKind.PYDOCS, SourceKind.PYSOURCE, SourceKind.TEXT)
"""Sources of documents, which are cut; the others hold a prompt in each record."""


def load_prompts(data: DataConfig, *, seed: int = 0) -> list[PromptText]:
    """Returns at most `data.num_prompts` distinct prompts, the same for the same source and seed.

    Of three or more that are chosen among others, one at least is held out: otherwise one trace of
    eight prompts in two could not be used to train.

    Raises:
        PromptError: no such file or data set, or no usable text in it.
    """
    texts: Iterable[str | TokenIds] = SOURCES[data.kind](data)
    if data.kind in LONG_TEXTS:
        longest = data.max_prompt_tokens * CHARS_PER_TOKEN
        whole = [text for text in texts if isinstance(text, str)]
        texts = cut_texts(whole, num_pieces=data.num_prompts, longest=longest)
    # Keeps the order and the first of equal texts.
    kept = list(
        dict.fromkeys(
            text
            for text in texts
            if not isinstance(text, str) or len(text.strip()) >= data.min_chars
        )
    )
    if not kept:
        raise PromptError(
            f"data={data.name} contains no text of at least {data.min_chars} characters: "
            "choose keys with data.fields=[KEY], or lower data.min_chars"
        )
    if len(kept) > data.num_prompts:
        kept = choose_prompts(kept, data.num_prompts, seed=seed)
    return [PromptText(text, data.name) for text in kept]


def choose_prompts(
    texts: Sequence[str | TokenIds], count: int, *, seed: int
) -> list[str | TokenIds]:
    """Returns `count` of more texts, in their order."""
    rng = random.Random(seed)
    chosen = rng.sample(range(len(texts)), count)
    if count >= FEWEST_TO_TRAIN and not any(is_held_out(texts[i]) for i in chosen):
        held_out = [i for i, text in enumerate(texts) if is_held_out(text)]
        if held_out:
            chosen[-1] = rng.choice(held_out)
    return [texts[i] for i in sorted(chosen)]


def is_held_out(text: str | TokenIds) -> bool:
    return choose_split(digest_of(text)) is Split.HELD_OUT


def cut_texts(texts: list[str], *, num_pieces: int, longest: int) -> Iterator[str]:
    """Yields about `num_pieces` pieces of equal length that do not overlap.

    There are more if pieces of `longest` characters do not use up the texts.
    """
    total = sum(map(len, texts))
    piece = max(MIN_PIECE_CHARS, min(longest, total // num_pieces))
    for text in texts:
        start = 0
        while start < len(text):
            end = start + piece
            if end < len(text):
                # Between two words, if there are spaces.
                space = max(text.rfind(" ", start, end), text.rfind("\n", start, end))
                end = space if space > start else end
            yield text[start:end].strip()
            start = end
