"""The task of lm-evaluation-harness: each document has its own continuation among others'."""

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

from benchmarks.cloze import CHOICES, CONTEXT_TOKENS, STRIDE, TASK, make_documents, write_task

MODEL = Path("runtime/models/qwen2_moe_tiny")


def test_documents__have_the_own_continuation_at_the_answer(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    tokens = torch.arange(8 * STRIDE) % 2000 + 300
    documents = make_documents(tokens, tokenizer)
    assert documents
    answers = {document["answer"] for document in documents}
    assert answers == set(range(min(CHOICES, len(documents))))
    for document in documents:
        assert document["context"] + document["choices"][document["answer"]] in [
            tokenizer.decode(window) for window in tokens.unfold(0, CONTEXT_TOKENS + 8, STRIDE)
        ]
        assert len(set(document["choices"])) == CHOICES
    write_task(tmp_path, tokens, tokenizer)
    lines = (tmp_path / f"{TASK}.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == documents
