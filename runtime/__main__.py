"""`python -m runtime COMMAND`: serve a model from a memory budget."""

import sys

from configs.cli import main
from configs.command import Command

SUMMARIES = {
    "generate": "continue a prompt with a model whose experts stay within a memory budget",
    "chat": "talk to a model in the terminal, as fast as its experts are brought",
    "serve": "an OpenAI-compatible server: all clients share one budget and what is read",
    "batch": "continue a file of prompts, at the highest tokens a second; it may be interrupted",
    "verify": "compare logits and tokens with plain Transformers eager, for several budgets",
    "pack": "repack a model's experts for direct reads, with checksums, on request quantised",
    "bench": "compare systems on this machine: same model and prompts, every token checked",
    "doctor": "what this machine and this model can do together, and which budget to give",
    "inflate": "write a copy of a model whose experts are larger and compute the same",
}

COMMANDS = tuple(
    Command(name=name, config=name, run=f"runtime.commands.{name}:run", summary=summary)
    for name, summary in SUMMARIES.items()
)

if __name__ == "__main__":
    sys.exit(main("runtime", COMMANDS))
