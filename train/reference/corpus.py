"""Training data of the reference model: folders of text packed into token files.

Also prompts of several kinds, on which the published predictors are trained and scored: a predictor
that was trained on one kind of text is worse on others. Trained on documentation alone, `residual`
had an accuracy of .92 one layer ahead on documentation and .86 on chat.
"""

import hashlib
import importlib
import inspect
import json
import pkgutil
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from collect.config import DataConfig
from collect.prompts import read_pydocs, read_source_code

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

HELD_OUT_SHARE = 0.02
DOCUMENT_CHARS = 6_000
"""Long books are cut here, so that a batch mixes many subjects and the split has many documents."""

MIXTURE = {
    "textbooks": 0.30,
    "novels": 0.18,
    "templates": 0.20,
    "instructions": 0.10,
    "roleplay": 0.08,
    "arithmetic": 0.06,
    "docstrings": 0.08,
}
"""Share of the training tokens taken from each source."""

STDLIB_MODULES = 120
"""Enough of the standard library's docstrings to teach the register of technical English."""


def chat(user: str, assistant: str) -> str:
    """One exchange in the ChatML form that the model's chat template writes."""
    return f"{TURN_START}user\n{user}{TURN_END}\n{TURN_START}assistant\n{assistant}{TURN_END}\n"


def _books(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.txt")):
        if path.name.endswith(".LICENSE.txt"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        paragraphs, size = [], 0
        for paragraph in text.split("\n\n"):
            paragraphs.append(paragraph)
            size += len(paragraph)
            if size >= DOCUMENT_CHARS:
                yield "\n\n".join(paragraphs)
                paragraphs, size = [], 0
        if paragraphs:
            yield "\n\n".join(paragraphs)


def _jsonl(path: Path) -> Iterator[dict]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _exchanges(path: Path, question: str, answer: str) -> list[str]:
    return [chat(row[question], row[answer]) for row in _jsonl(path)]


def _roleplay(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.json")):
        for row in json.loads(path.read_text(encoding="utf-8")):
            question = "\n".join(part for part in (row["instruction"], row["input"]) if part)
            yield chat(question, row["response"])


def _docstrings() -> Iterator[str]:
    names = sorted(name for _, name, _ in pkgutil.iter_modules() if name in sys.stdlib_module_names)
    names = [name for name in names if name.islower() and name not in ("antigravity", "this")]
    for name in names[:STDLIB_MODULES]:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue  # platform modules are listed everywhere and importable in some places only
        parts = [inspect.getdoc(module) or ""]
        for member, value in sorted(vars(module).items()):
            if callable(value) and not member.startswith("_"):
                parts.append(f"{name}.{member}: {inspect.getdoc(value) or ''}")
        yield "\n\n".join(part for part in parts if part)[: 4 * DOCUMENT_CHARS]


def documents(root: Path) -> dict[str, list[str]]:
    """Every source's documents, in a fixed order."""
    return {
        "textbooks": list(_books(root / "text/openstax")),
        "novels": list(_books(root / "text/novels")),
        "templates": _exchanges(
            root / "instruct/t0_templates_sample.jsonl", "prompt", "completion"
        ),
        "instructions": [
            chat(row["prompt"], target if isinstance(target, str) else target[0])
            for row in _jsonl(root / "instruct/natural_instructions_bb.jsonl")
            if (target := row["target"])
        ],
        "roleplay": list(_roleplay(root / "instruct/gpteacher")),
        "arithmetic": _exchanges(root / "prompts/gsm8k_train.jsonl", "question", "answer"),
        "docstrings": list(_docstrings()),
    }


def is_held_out(document: str) -> bool:
    """Split by content, so that the same document is always on the same side."""
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def pack(
    sources: dict[str, list[str]], tokenizer: Tokenizer, folder: Path, *, num_tokens: int, seed: int
) -> None:
    """Writes `train.bin` and `held_out.bin`, uint16 token ids, documents ended by `END_OF_TEXT`."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    """By whether they are held out."""
    for name, texts in sources.items():
        wanted = int(num_tokens * MIXTURE[name])
        left = {False: wanted, True: wanted // 50}
        for text in random.Random(f"{seed}/{name}").sample(texts, len(texts)):
            if max(left.values()) <= 0:
                break
            held_out = is_held_out(text)
            if left[held_out] > 0:
                ids = np.asarray([*tokenizer.encode(text).ids, end], dtype=np.uint16)
                parts[held_out].append(ids)
                left[held_out] -= len(ids)
    shuffle = random.Random(seed)
    for held_out, documents in parts.items():
        shuffle.shuffle(documents)
        file = "held_out.bin" if held_out else "train.bin"
        np.concatenate(documents).tofile(folder / file)


VOCAB_SIZE = 8_192
SAMPLE_CHARS = 24_000_000
"""BPE merges settle well before this much text; more only costs minutes."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def fit_tokenizer(sources: dict[str, list[str]], *, seed: int) -> Tokenizer:
    """Learns the merges from an even share of every source."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_sample(sources, seed=seed), trainer)
    return tokenizer


def _sample(sources: dict[str, list[str]], *, seed: int) -> Iterable[str]:
    share = SAMPLE_CHARS // len(sources)
    for name, texts in sources.items():
        taken = 0
        for text in random.Random(f"{seed}/{name}").sample(texts, len(texts)):
            if taken > share:
                break
            taken += len(text)
            yield text


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer as Transformers saves and loads it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START, TURN_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2_048,
        padding_side="left",
    )


PIECE_CHARS = 800
"""Long texts are cut here; a rest of less than a quarter is left out."""
MAX_CHARS = 4_000
"""More than any prompt that is recorded."""
PROMPTS_HELD_OUT_SHARE = 0.1
NUM_TRAINING, NUM_HELD_OUT = 1_600, 64
"""Most prompts of each kind."""


def write_prompts(root: Path, folder: Path, *, seed: int) -> dict[str, int]:
    """Writes `train.jsonl`, a mixture, and held-out prompts of each kind, `KIND.jsonl`.

    Args:
        root: Folder of the corpus, as for the model's training.
        folder: Existing folder.
        seed: Chooses the prompts, and their order.

    Returns:
        The number of prompts in each file.
    """
    rng = random.Random(seed)
    files: dict[str, list[dict[str, str]]] = {}
    mixture: list[dict[str, str]] = []
    for kind, texts in read_kinds(root).items():
        texts = sorted({text for text in texts if text.strip()})
        rng.shuffle(texts)
        parts: dict[bool, list[dict[str, str]]] = {True: [], False: []}
        for text in texts:
            row = {"kind": kind, "prompt": text[:MAX_CHARS]}
            parts[is_held_out_prompt(text)].append(row)
        files[kind] = parts[True][:NUM_HELD_OUT]
        mixture += parts[False][:NUM_TRAINING]
    rng.shuffle(mixture)
    files["train"] = mixture
    for name, rows in files.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return {name: len(rows) for name, rows in files.items()}


def read_kinds(root: Path) -> dict[str, list[str]]:
    """Returns texts by kind, in a fixed order."""
    sources = documents(root)
    return {
        "docs": list(_pieces(read_pydocs(DataConfig()))),
        "code": list(_pieces(read_source_code(DataConfig()))),
        "chat": sources["roleplay"],
        "instructions": [*sources["templates"], *sources["instructions"], *sources["arithmetic"]],
        "books": list(_pieces([*sources["textbooks"], *sources["novels"]])),
    }


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for start in range(0, len(text) - PIECE_CHARS // 4, PIECE_CHARS):
            yield text[start : start + PIECE_CHARS]


def is_held_out_prompt(text: str) -> bool:
    """Split by content, as the published predictors' prompts were."""
    first = hashlib.sha256(text.encode()).digest()[0]
    return first < PROMPTS_HELD_OUT_SHARE * 256
