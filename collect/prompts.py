"""Prompts: texts of Python's documentation, of local files or of the Hub, chosen and cut.

A prompt that a server has recorded (`moecast serve record=FILE`) is a tuple of token ids.
"""

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from collect.config import DataConfig, SourceKind
from collect.errors import PromptError
from collect.traces.layout import Split, choose_split, prompt_digest
from predictors.files import expand_home, explain_no_home, read_text_file, require_plain_file
from predictors.records import is_absent, whole_number
from runtime.generation.messages import check_encodable, content_text, describe_skipped

log = logging.getLogger(__name__)

CHARS_PER_TOKEN = 4
"""Approximate, for English and common vocabularies."""

FEWEST_TO_TRAIN = 3
"""Prompts: one to train on, one for validation, one held out."""

MIN_PIECE_CHARS = 200
"""Shortest piece of a long text, however many prompts are requested."""


TokenIds = tuple[int, ...]
Prompt = str | TokenIds


def digest_of(prompt: Prompt) -> str:
    return prompt_digest(prompt if isinstance(prompt, str) else json.dumps(prompt))


USUAL_FIELDS = (
    "prompt", "text", "question", "instruction", "content", "messages", "conversations",
)  # fmt: skip
CONVERSATIONS = ("messages", "conversations", "conversation")
TEXT = "text"
"""Key of a line that is a text, not an object."""
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


Record = tuple[str, Any]
"""The place of a record, for messages, and the record."""


def read_jsonl(data: DataConfig) -> Iterator[Record]:
    """Yields the content of each line."""
    path = _local(data)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line)
            except json.JSONDecodeError as error:
                raise PromptError(
                    f"{where} is not JSON ({error.msg}); use data=text for plain text"
                ) from None
            except (ValueError, RecursionError) as error:
                # Bytes that are not UTF-8, a number of thousands of digits, or lists within lists.
                raise PromptError(f"{where} cannot be read as JSON: {error}") from None


def extract_tokens(given: Any, *, where: str) -> TokenIds:
    tokens = tuple(map(whole_number, given)) if isinstance(given, list) else ()
    if not tokens or not all(type(token) is int and token >= 0 for token in tokens):
        raise PromptError(f"{where}: tokens must be a list of token ids, such as [12, 7]")
    return tokens


def _local(data: DataConfig) -> Path:
    if data.path is None:
        raise PromptError(f"data={data.name} needs a file: data.path=FILE")
    path = require_plain_file(expand_home(data.path), PromptError)
    if not path.is_file():
        raise PromptError(f"data.path={data.path}: no such file. {OFFLINE}")
    return path


def read_hub(data: DataConfig) -> Iterator[Record]:
    """Yields the rows of a Hub data set, which is cached.

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
        yield f"{data.path}, row {number}", row


def extract_prompt(row: Any, fields: Sequence[str], skipped: Counter[str], *, where: str) -> Prompt:
    """Returns the prompt in a record: its token ids, or the text of the chosen or usual keys.

    A record may lack any of the usual keys, or have null there.

    Args:
        skipped: counts parts of messages that are no text.

    Raises:
        PromptError: no key fits; the message lists the record's.
    """
    if isinstance(row, str):
        row, fields = {TEXT: row}, (TEXT,)
    if not isinstance(row, Mapping):
        raise PromptError(f"{where}: expected a record with keys, got {type(row).__name__}")
    row = {key: None if is_absent(value) else value for key, value in row.items()}
    known, tokens = [key for key in USUAL_FIELDS if key in row], row.get(TOKENS)
    # Some data sets have the words of their text under this name.
    are_words = known and isinstance(tokens, list) and any(isinstance(it, str) for it in tokens)
    if tokens is not None and not fields and not are_words:
        return extract_tokens(tokens, where=where)
    chosen = list(fields) or [key for key in known if row[key] is not None][:1] or known[:1]
    if not chosen or any(key not in row for key in chosen):
        problem = f"has no {', '.join(key for key in chosen if key not in row)}" if chosen else ""
        raise PromptError(
            f"{where} {problem or 'has none of the usual keys'}; it has "
            f"{', '.join(map(str, row))}. Choose with data.fields=[KEY]"
        )
    try:
        texts = [prompt_text(parse_conversation(key, row[key]), skipped) for key in chosen]
        return check_encodable("\n\n".join(filter(None, texts)))
    except ValueError as error:
        raise PromptError(f"{where}: {error}") from None


def parse_conversation(key: str, value: Any) -> Any:
    """Returns the turns that a table without nested columns holds as JSON; others as they are."""
    if key not in CONVERSATIONS or not isinstance(value, str) or value.lstrip()[:1] not in "[{":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value  # a text that begins with a bracket


def prompt_text(value: Any, skipped: Counter[str]) -> str:
    """Returns a text itself, a conversation's first user turn, or the first text of a list."""
    given = [value] if isinstance(value, Mapping) else value
    if not isinstance(given, list) or not given:
        return content_text(value, skipped)
    if not any(isinstance(part, Mapping) for part in given):
        return prompt_text(given[0], skipped)
    turns = [turn for turn in given if isinstance(turn, Mapping) and turn.keys() & {"role", "from"}]
    if not turns:
        return content_text(value, skipped)
    texts = (
        content_text(turn.get("value") if turn.get("content") is None else turn["content"], skipped)
        for turn in turns
        if turn.get("role", turn.get("from")) in USER_ROLES
    )
    return next(filter(str.strip, texts), "")


DOCUMENTS: Mapping[SourceKind, Callable[[DataConfig], Iterable[str]]] = {
    SourceKind.PYDOCS: read_pydocs,
    SourceKind.PYSOURCE: read_source_code,
    SourceKind.TEXT: read_text_files,
}
"""Sources of long texts, which are cut; the others hold a prompt in each record."""


def load_prompts(data: DataConfig, *, seed: int = 0) -> list[Prompt]:
    """Returns at most `data.num_prompts` distinct prompts, the same for the same source and seed.

    Of three or more that are chosen among others, one at least is held out: otherwise one trace of
    eight prompts in two could not be used to train.

    Raises:
        PromptError: no such file or data set, or no usable text in it.
    """
    texts: Iterable[Prompt]
    if data.kind in DOCUMENTS:
        longest = data.max_prompt_tokens * CHARS_PER_TOKEN
        whole = list(DOCUMENTS[data.kind](data))
        texts = cut_texts(whole, num_pieces=data.num_prompts, longest=longest)
    else:
        texts = read_records(data)
    # Keeps the order and the first of equal texts.
    kept = [
        text
        for text in dict.fromkeys(texts)
        if not isinstance(text, str) or len(text.strip()) >= data.min_chars
    ]
    if not kept:
        raise PromptError(
            f"data={data.name} contains no text of at least {data.min_chars} characters: "
            "choose keys with data.fields=[KEY], or lower data.min_chars"
        )
    if len(kept) > data.num_prompts:
        kept = choose_prompts(kept, data.num_prompts, seed=seed)
    return kept


def read_records(data: DataConfig) -> list[Prompt]:
    """Returns the prompts of records, and logs what was no text in them."""
    skipped: Counter[str] = Counter()
    rows = read_jsonl(data) if data.kind is SourceKind.JSONL else read_hub(data)
    texts = [extract_prompt(row, data.fields, skipped, where=where) for where, row in rows]
    if skipped:
        log.warning("data=%s: %s", data.name, describe_skipped(skipped))
    if num_empty := texts.count(""):
        log.warning("data=%s: %d of %d records have no text", data.name, num_empty, len(texts))
    return texts


def choose_prompts(texts: Sequence[Prompt], count: int, *, seed: int) -> list[Prompt]:
    """Returns `count` of more texts, in their order."""
    rng = random.Random(seed)
    chosen = rng.sample(range(len(texts)), count)
    if count >= FEWEST_TO_TRAIN and not any(is_held_out(texts[i]) for i in chosen):
        held_out = [i for i, text in enumerate(texts) if is_held_out(text)]
        if held_out:
            chosen[-1] = rng.choice(held_out)
    return [texts[i] for i in sorted(chosen)]


def is_held_out(text: Prompt) -> bool:
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
