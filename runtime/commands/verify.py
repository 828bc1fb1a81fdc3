"""`python -m runtime verify`: is what we serve exactly the model?"""

from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedModel

from runtime.config import VerifyConfig
from runtime.loading import load
from runtime.models import resolve
from runtime.plain import load_plain


class NotExact(RuntimeError):
    """Ours, not the user's: a budgeted model differed from the plain one."""


def answer(model: PreTrainedModel, tokens: list[int], max_new_tokens: int) -> tuple[Any, list[int]]:
    """Logits of the prompt `(1, T, vocabulary)` and the greedy continuation."""
    inputs = torch.tensor([tokens])
    mask = torch.ones_like(inputs)
    with torch.no_grad():
        logits = model(inputs, attention_mask=mask).logits
    output = model.generate(
        inputs, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False
    )
    return logits, output[0].tolist()


def run(config: VerifyConfig) -> dict[str, Any]:
    """Compares every prompt at every budget; fails at the end if anything differed."""
    console = Console()
    folder = resolve(config.model)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in config.prompts]
    rows: list[dict[str, Any]] = []
    expected: list[tuple[Any, list[int]]] = []
    for budget in config.budgets:
        model = load(config.model, predictor=config.predictor, budget=budget, system=config.system)
        with model.moecast as handle:
            if not expected:
                plain = load_plain(folder, dtype=model.dtype)
                expected = [answer(plain, tokens, config.max_new_tokens) for tokens in prompts]
                del plain
            found = [answer(model, tokens, config.max_new_tokens) for tokens in prompts]
            stats = handle.stats()
        pairs = list(zip(found, expected, strict=True))
        rows.append(
            {
                "budget": budget,
                "arena_bytes": stats["arena_bytes"],
                "prompts": len(prompts),
                "logits_bitwise_equal": all(torch.equal(a[0], b[0]) for a, b in pairs),
                "tokens_equal": all(a[1] == b[1] for a, b in pairs),
                "tokens_compared": sum(len(b[1]) for _, b in pairs),
                "misses": stats["misses"],
                "bytes_moved": stats["bytes_moved"],
            }
        )
    table = Table(title=f"{config.model.name} against Transformers eager")
    for column in ("budget", "prompts", "logits bitwise equal", "tokens equal", "misses"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["budget"],
            str(row["prompts"]),
            str(row["logits_bitwise_equal"]),
            str(row["tokens_equal"]),
            str(row["misses"]),
        )
    console.print(table)
    wrong = [r["budget"] for r in rows if not (r["logits_bitwise_equal"] and r["tokens_equal"])]
    if wrong:
        raise NotExact(f"output differs from Transformers eager at budgets {', '.join(wrong)}")
    return {"model": config.model.name, "rows": rows}
