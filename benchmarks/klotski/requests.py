"""Prompts of one length, the same on every machine with this Python: text of its own modules."""

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer

from runtime.generation.batch.prompts import BatchPrompt

MODULES = (
    "argparse", "asyncio", "collections", "csv", "dataclasses", "datetime", "decimal", "difflib",
    "email", "enum", "fractions", "functools", "heapq", "html", "http.client", "inspect",
    "ipaddress", "itertools", "json", "logging", "mailbox", "math", "numbers", "optparse", "os",
    "pathlib", "pdb", "pickle", "pydoc", "random", "re", "shutil", "socket", "statistics",
    "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "turtle", "typing",
    "unittest", "urllib.parse", "uuid", "weakref", "xml.dom.minidom", "zipfile",
)  # fmt: skip


def texts() -> Iterator[str]:
    """Docstrings, longest modules' included, in a fixed order."""
    for name in MODULES:
        module = importlib.import_module(name)
        for owner in (module, *(one for _, one in inspect.getmembers(module, inspect.isclass))):
            for _, member in inspect.getmembers(owner):
                text, where = inspect.getdoc(member), getattr(member, "__module__", None)
                if text and str(where).startswith(name.partition(".")[0]):
                    yield text


def prompts_of(model: Path, count: int, *, num_tokens: int, new_tokens: int) -> list[BatchPrompt]:
    """`count` prompts of `num_tokens`, each of another docstring."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    found: list[BatchPrompt] = []
    seen: set[str] = set()
    for text in texts():
        if text in seen:
            continue
        seen.add(text)
        tokens = tokenizer(text)["input_ids"]
        if len(tokens) >= num_tokens:
            found.append(BatchPrompt(len(found), tuple(tokens[:num_tokens]), new_tokens))
        if len(found) == count:
            return found
    raise ValueError(f"{len(found)} docstrings of {num_tokens} tokens, {count} are asked for")
